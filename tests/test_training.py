"""The paper's mechanism while a model trains: any loop, the Trainer, several processes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import HEADS, LAYERS, random_ids, tiny_model
from reload import other_process
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import aah_hf
from aah_hf import AAHConfig, CalibrationError, attention
from aah_hf.calibration.features import moments
from aah_hf.calibration.paper import decide_offline
from aah_hf.calibration.run import RegimeRun
from aah_hf.families import attention_modules
from aah_hf.training import REGIMES, AAHCallback, AdaptiveWindows, Controllers, load_controllers, regime
from aah_hf.training.decisions import COLUMNS, DecisionLog, decisions_of, read_decisions, summary
from aah_hf.training.state import STATE_FILE

LENGTH = 32


def rules(name="full_adaptive", **changes):
    return regime(name, seq_len=LENGTH, **{"control_interval": 3, "warmup_steps": 1} | changes)


def train(windows: AdaptiveWindows, steps: int, seed: int = 0) -> list[float]:
    model, losses = windows.model.train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = random_ids(2, LENGTH, seed=1000 * seed + step)
        with windows.step():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", REGIMES)
def test_every_regime_trains_and_its_config_always_says_what_runs(name):
    model = tiny_model("qwen3")
    windows = AdaptiveWindows(model, rules(name))
    for _ in range(5):
        train(windows, 1)
        in_force = tuple(module.aah_layer.windows for _, module in attention_modules(model))
        assert AAHConfig.from_model(model).windows == in_force == windows.run.windows
    assert windows.run.step == 5
    assert windows.run.states[0].decisions == 2, "at the steps 1 and 4"


@pytest.mark.slow
def test_every_regime_reloads_in_a_new_process_with_equal_logits(tmp_path):
    ids = random_ids(2, LENGTH)
    with other_process() as reader:
        for name in REGIMES:
            model = tiny_model("qwen3")
            train(AdaptiveWindows(model, rules(name)), 6)
            model.eval().save_pretrained(tmp_path / name)
            with torch.no_grad():
                expected = model(ids).logits
            assert torch.equal(reader.logits(tmp_path / name, ids), expected), name
            decided = regime(name).windows == "controller"
            assert (tmp_path / name / "aah_controller.safetensors").exists() == decided


def test_checkpoint_of_a_trained_model_reloads_equal(tmp_path):
    model, ids = tiny_model("qwen3"), random_ids(2, LENGTH)
    windows = AdaptiveWindows(model, rules("shallow_freeze"))
    train(windows, 6)
    model.eval().save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)
    plan = AAHConfig.from_model(again)
    assert plan.provenance["objective"] == "paper" and plan.provenance["decisions"] == 2 and plan.groups is not None
    loaded, own = load_controllers(tmp_path).state_dict(), windows.run.controllers.state_dict()
    assert all(torch.equal(loaded[key], own[key]) for key in own)


@pytest.mark.parametrize("name", ["full_adaptive", "shallow_freeze", "deep_practical_reuse", "fixed_random_grouping"])
def test_training_decides_what_the_calibration_path_decides_on_the_same_steps(name):
    """Two ways to run attention, one regime: with weights that stay, both must choose the same windows."""
    config = rules(name, warmup_steps=1, control_interval=1)
    sequences = [random_ids(1, LENGTH, seed=step)[0] for step in range(4)]
    model = tiny_model("qwen3")
    windows = AdaptiveWindows(model, config)
    for ids in sequences:
        with windows.step(), torch.no_grad():
            model(input_ids=ids[None])
    offline = decide_offline(tiny_model("qwen3"), sequences, config, sink_tokens=0, seq_len=LENGTH)
    ours = tuple(tuple(None if w == LENGTH else w for w in layer) for layer in windows.run.windows)
    assert ours == offline.windows and windows.plan().groups == offline.groups
    for mine in windows.run.states:
        assert mine.decisions == 3 and np.isfinite(mine.smoothed).all()


def test_between_decisions_nothing_hangs_on_the_modules_and_nothing_is_replaced():
    model = tiny_model("qwen3")
    windows = AdaptiveWindows(model, rules(control_interval=6, warmup_steps=0))
    train(windows, 1)  # decides
    layers = [module.aah_layer for _, module in attention_modules(model)]
    plan = model.config.aah
    for _ in range(3):
        windows.begin_step()
        assert not any(attention.NEXT_CALL in module.__dict__ for _, module in attention_modules(model))
        windows.end_step()
    assert all(module.aah_layer is layer for (_, module), layer in zip(attention_modules(model), layers))
    assert model.config.aah is plan


def test_the_first_micro_batch_decides_for_all():
    def windows_after(batches):
        model = tiny_model("qwen3")
        windows = AdaptiveWindows(model, rules(warmup_steps=0, control_interval=1))
        with windows.step():
            for ids in batches:
                model(input_ids=ids, labels=ids).loss.backward()
        assert windows.run.step == 1
        return windows.run

    first, second = random_ids(1, LENGTH, seed=1), random_ids(1, LENGTH, seed=2)
    both, alone = windows_after([first, second]), windows_after([first])
    assert both.windows == alone.windows
    assert np.array_equal(both.states[0].attention.usage, alone.states[0].attention.usage)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_decides_once_and_changes_no_gradient(reentrant):
    def run(checkpointing):
        model = tiny_model("qwen3").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        windows = AdaptiveWindows(model, rules(warmup_steps=0, control_interval=1))
        for step in range(2):
            ids = random_ids(1, LENGTH, seed=step)
            with windows.step():
                model(input_ids=ids, labels=ids).loss.backward()
        return windows.run, [p.grad for p in model.parameters()]

    (plain, expected), (checked, gradients) = run(False), run(True)
    assert checked.windows == plain.windows and checked.step == 2
    for ours, theirs in zip(gradients, expected):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_features_of_a_padded_batch_are_those_of_its_largest_sequence(side):
    long, short = random_ids(1, LENGTH, seed=1), random_ids(1, 10, seed=2)
    padding = torch.zeros(1, LENGTH - 10, dtype=torch.long)
    parts = [padding, short] if side == "left" else [short, padding]
    row = torch.cat(parts, 1)
    batch, mask = torch.cat([row, long]), torch.cat([(row != 0).long(), torch.ones_like(long)])

    def features(**inputs):
        model = tiny_model("qwen3")
        windows = AdaptiveWindows(model, rules(warmup_steps=0, control_interval=1))
        with windows.step(), torch.no_grad():
            model(**inputs)
        return windows.run.states

    padded, alone = features(input_ids=batch, attention_mask=mask), features(input_ids=long)
    for a, b in zip(padded, alone):
        np.testing.assert_allclose(a.smoothed, b.smoothed, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(a.attention.entropy, b.attention.entropy, rtol=1e-5, atol=1e-6)


def test_packed_documents_are_looked_at_one_by_one():
    long, short = random_ids(1, 24, seed=1), random_ids(1, 8, seed=2)
    positions = torch.cat([torch.arange(24), torch.arange(8)])[None]

    def state(**inputs):
        model = tiny_model("qwen3")
        windows = AdaptiveWindows(model, rules(warmup_steps=0, control_interval=1))
        with windows.step(), torch.no_grad():
            model(**inputs)
        return windows.run.states[0]

    packed = state(input_ids=torch.cat([long, short], 1), position_ids=positions)
    np.testing.assert_allclose(packed.smoothed, state(input_ids=long).smoothed, rtol=1e-5, atol=1e-6)


def test_a_step_that_fails_leaves_windows_and_states_as_they_were():
    model = tiny_model("qwen3")
    windows = AdaptiveWindows(model, rules(warmup_steps=0, control_interval=1))
    train(windows, 2)
    before, states = windows.run.windows, list(windows.run.states)
    with pytest.raises(ZeroDivisionError), windows.step():
        model(input_ids=random_ids(1, LENGTH, seed=77))
        raise ZeroDivisionError
    assert windows.run.windows == before and windows.run.states == states
    assert tuple(module.aah_layer.windows for _, module in attention_modules(model)) == before
    train(windows, 1)


def test_a_decision_without_a_forward_pass_is_an_error():
    windows = AdaptiveWindows(tiny_model("qwen3"), rules(warmup_steps=0))
    windows.begin_step()
    with pytest.raises(CalibrationError, match="ran no attention in this step"):
        windows.end_step()
    with pytest.raises(CalibrationError, match="was not ended"):
        windows.begin_step()
        windows.begin_step()


def test_four_dimensional_masks_and_caches_are_refused_where_a_decision_looks():
    model = tiny_model("qwen3")
    windows = AdaptiveWindows(model, rules(warmup_steps=0))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    with pytest.raises(CalibrationError, match="4D attention mask"), windows.step():
        model(input_ids=random_ids(1, LENGTH), attention_mask=mask)


def test_evaluation_between_steps_runs_the_windows_in_force_and_decides_nothing():
    model = tiny_model("qwen3")
    windows = AdaptiveWindows(model, rules(warmup_steps=0))
    train(windows, 2)
    ids = random_ids(1, LENGTH, seed=5)
    frozen = aah_hf.patch_model(tiny_model("qwen3"), config=AAHConfig.from_model(model))
    frozen.load_state_dict(model.state_dict())
    before = windows.run.step
    assert torch.equal(model.eval()(ids).logits, frozen.eval()(ids).logits)
    assert windows.run.step == before


def test_controllers_of_another_regime_or_model_are_refused():
    config = rules("full_adaptive")
    model = tiny_model("qwen3")
    with pytest.raises(CalibrationError, match=f"for {LAYERS + 1} layers and the model has {LAYERS}"):
        AdaptiveWindows(model, config, controllers=Controllers.untrained(config, LAYERS + 1))
    other = rules("full_adaptive", candidate_windows=(8, 16))
    with pytest.raises(CalibrationError, match="scores 2 windows"):
        AdaptiveWindows(model, config, controllers=Controllers.untrained(other, LAYERS))
    alone = rules("independent_scoring")
    with pytest.raises(CalibrationError, match="no weights"):
        AdaptiveWindows(model, config, controllers=Controllers.untrained(alone, LAYERS))
    with pytest.raises(CalibrationError, match="has no controller"):
        AdaptiveWindows(model, rules("full_attention"), controllers=Controllers.untrained(config, LAYERS))
    assert not aah_hf.is_patched(model), "nothing was changed"


def test_drawing_controllers_leaves_the_random_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    AdaptiveWindows(tiny_model("qwen3"), rules("full_adaptive"))  # tiny_model seeds with 0
    torch.manual_seed(3)
    Controllers.untrained(rules("full_adaptive"), 2)
    assert torch.equal(torch.rand(4), expected)


# --- Trainer ---------------------------------------------------------------------------------------------------


def trainer_for(folder, callback, steps, **settings):
    model = tiny_model("qwen3")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **settings,
    )
    data = [{"input_ids": ids, "labels": ids} for ids in random_ids(40, LENGTH)]
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])


def test_the_callback_logs_every_decision_to_the_trainer_and_to_csv(tmp_path):
    callback = AAHCallback(rules("full_adaptive"), csv=tmp_path / "decisions.csv")
    trainer = trainer_for(tmp_path / "out", callback, 8)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "aah/acr" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 5, 8], "the first step, then after the steps 1, 4 and 7"
    last = logged[-1]
    assert last["aah/acr"] == pytest.approx(aah_hf.coverage(trainer.model, LENGTH).acr)
    assert sum(value for key, value in last.items() if key.startswith("aah/window_")) == pytest.approx(1)
    rows = read_decisions(tmp_path / "decisions.csv")
    assert [(int(r["step"]), int(r["layer"])) for r in rows] == [(s, i) for s in (0, 1, 4, 7) for i in range(LAYERS)]
    row = rows[-1]
    assert json.loads(row["windows"]) == list(trainer.model.model.layers[-1].self_attn.aah_layer.windows)
    levels, logits = json.loads(row["levels"]), json.loads(row["logits"])
    assert len(json.loads(row["groups"])) == HEADS and [len(level) for level in logits] == levels
    assert all(len(scores) == 4 for level in logits for scores in level)
    assert all(margin >= 0 for level in json.loads(row["margins"]) for margin in level)
    assert sum(json.loads(row["histogram"]).values()) == HEADS
    assert json.loads(rows[0]["windows"]) == [None] * HEADS, "warm-up"


def test_reporters_see_our_entries_when_we_join_ahead_of_them(tmp_path):
    from transformers import TrainerCallback

    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append("aah/acr" in logs)

    trainer = trainer_for(tmp_path, Reporter(), 2)
    AAHCallback(rules("full_adaptive")).add_to(trainer)
    trainer.train()
    assert seen[:2] == [True, True]


def test_a_resumed_training_ends_where_an_uninterrupted_one_does(tmp_path):
    straight = trainer_for(tmp_path / "a", AAHCallback(rules("full_adaptive"), csv=tmp_path / "a.csv"), 10)
    straight.train()
    first = trainer_for(tmp_path / "b", AAHCallback(rules("full_adaptive"), csv=tmp_path / "b.csv"), 5)
    first.train()  # its checkpoint is of step 4, so the fifth step is lost
    second = trainer_for(tmp_path / "b", AAHCallback(rules("full_adaptive"), csv=tmp_path / "b.csv"), 10)
    second.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))
    assert AAHConfig.from_model(second.model).windows == AAHConfig.from_model(straight.model).windows
    theirs = straight.model.state_dict()
    assert all(torch.equal(x, theirs[key]) for key, x in second.model.state_dict().items())
    assert (tmp_path / "b.csv").read_text() == (tmp_path / "a.csv").read_text()


def test_checkpoints_of_the_trainer_are_ordinary_patched_checkpoints(tmp_path):
    trainer = trainer_for(tmp_path, AAHCallback(rules("shallow_freeze")), 4)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    assert {"aah_controller.safetensors", STATE_FILE, "model.safetensors"} <= {p.name for p in folder.iterdir()}
    again = type(trainer.model).from_pretrained(folder)
    ids = random_ids(1, LENGTH)
    assert torch.equal(again.eval()(ids).logits, trainer.model.eval()(ids).logits)


def test_resuming_without_the_state_of_the_regime_is_an_error(tmp_path):
    trainer_for(tmp_path, AAHCallback(rules()), 4).train()
    (tmp_path / "checkpoint-4" / STATE_FILE).unlink()
    trainer = trainer_for(tmp_path, AAHCallback(rules()), 8)
    with pytest.raises(CalibrationError, match="resume_from"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_data_parallel_copies_are_refused(tmp_path):
    callback = AAHCallback(rules())
    trainer = trainer_for(tmp_path, callback, 1)
    trainer.args._n_gpu = 2
    with pytest.raises(CalibrationError, match="accelerate launch"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def test_a_name_instead_of_a_regime_is_refused():
    with pytest.raises(CalibrationError, match="pass a configuration"):
        AAHCallback("shallow_freeze")


# --- files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    windows = AdaptiveWindows(tiny_model("qwen3"), rules("deep_practical_reuse"))
    train(windows, 5)
    windows.model.save_pretrained(tmp_path)
    windows.save_state(tmp_path)
    return windows, tmp_path


def test_a_restored_run_goes_on_like_the_one_that_was_saved(trained):
    windows, folder = trained
    model = tiny_model("qwen3")
    model.load_state_dict(windows.model.state_dict())
    again = AdaptiveWindows(model, rules("deep_practical_reuse"))
    again.restore(folder)
    assert AAHConfig.from_model(model).windows == windows.run.windows
    assert train(again, 4, seed=1) == train(windows, 4, seed=1)
    assert again.run.windows == windows.run.windows and again.plan().groups == windows.plan().groups


@pytest.mark.parametrize("file", ["aah_controller.safetensors", STATE_FILE])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "gone", "header", "nan"])
def test_damaged_files_are_clear_errors_and_change_nothing(trained, file, damage):
    from safetensors.torch import save_file

    _, folder = trained
    path = folder / file
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "garbage":
        path.write_bytes(b"\x80\x04not a safetensors file" * 20)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "gone":
        path.unlink()
    elif damage == "header":
        save_file(load_file(path), path)  # the same tensors without metadata
    else:
        tensors = {key: x * float("nan") if x.is_floating_point() else x for key, x in load_file(path).items()}
        save_file(tensors, path)
    fresh = AdaptiveWindows(tiny_model("qwen3"), rules("deep_practical_reuse"))
    before = fresh.run.states
    with pytest.raises(CalibrationError) as caught:
        fresh.restore(folder)
    assert str(folder) in str(caught.value)
    assert fresh.run.states is before
    type(fresh.model).from_pretrained(folder)  # the model itself needs neither file


def test_a_state_of_another_regime_or_model_is_refused(trained):
    _, folder = trained
    with pytest.raises(CalibrationError, match="under"):
        AdaptiveWindows(tiny_model("qwen3"), rules("full_adaptive")).restore(folder)
    deeper = tiny_model("qwen3", num_hidden_layers=LAYERS + 1)
    with pytest.raises(CalibrationError, match="layers and the model has"):
        AdaptiveWindows(deeper, rules("deep_practical_reuse")).restore(folder)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(trained, monkeypatch):
    from aah_hf.calibration import weights

    windows, folder = trained
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(weights, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        windows.save_state(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_decision_log_drops_what_a_resumed_run_repeats_and_what_a_kill_cut_short(tmp_path):
    windows = AdaptiveWindows(tiny_model("qwen3"), rules(warmup_steps=0, control_interval=1))
    path = tmp_path / "log.csv"
    log = DecisionLog(path)
    for _ in range(3):
        train(windows, 1)
        log.write(decisions_of(windows.run, LENGTH))
    whole = path.read_text()
    with path.open("a") as file:
        file.write("3,0,full_ad")
    assert len(read_decisions(path)) == 3 * LAYERS
    DecisionLog(path, keep_steps=2)
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[: 1 + 2 * LAYERS])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CalibrationError, match="no decision log"):
        DecisionLog(tmp_path / "other.csv", keep_steps=1)
    with path.open(newline="") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS


# --- several processes, cost -----------------------------------------------------------------------------------

_RANK = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
from conftest import random_ids, tiny_model
from safetensors.torch import save_file
from test_training import LENGTH, rules
from aah_hf.training import AdaptiveWindows
model = tiny_model("qwen3").train()
windows = AdaptiveWindows(model, rules("full_adaptive", candidate_windows=(2, 4, 8, 12, 16, 32), control_interval=2))
parallel = torch.nn.parallel.DistributedDataParallel(model)
seen = []
for step in range(6):
    ids = random_ids(2, LENGTH, seed=10 * step + rank)
    with windows.step():
        parallel(input_ids=ids, labels=ids).loss.backward()
    seen.append(torch.tensor([[w or 0 for w in layer] for layer in windows.run.windows]))
save_file({"windows": torch.stack(seen)}, sys.argv[2] + f"/rank{rank}.safetensors")
"""


@pytest.mark.slow
def test_all_processes_run_what_rank_zero_decides_on_its_own_data(tmp_path, repo):
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, str(repo / "tests"), str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(repo)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (load_file(tmp_path / f"rank{rank}.safetensors")["windows"] for rank in (0, 1))
    assert torch.equal(first, second)
    config = rules("full_adaptive", candidate_windows=(2, 4, 8, 12, 16, 32), control_interval=2)
    alone = AdaptiveWindows(tiny_model("qwen3").train(), config)
    for step in range(6):
        ids = random_ids(2, LENGTH, seed=10 * step)
        with alone.step():
            alone.model(input_ids=ids, labels=ids).loss.backward()
        assert first[step].tolist() == [[w or 0 for w in layer] for layer in alone.run.windows]


@pytest.mark.slow
def test_a_decision_for_36_layers_of_32_heads_takes_under_50_ms():
    config = regime("full_adaptive", control_interval=1)
    run = RegimeRun(config, layers=36, query_heads=32)
    draw = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(7):
        seen = [
            moments(
                *(
                    torch.randn(1, n, 32, 16, generator=draw) * torch.rand(1, n, 1, 1, generator=draw)
                    for n in (32, 8, 8)
                )
            )
            for _ in range(36)
        ]
        run.begin()
        start = time.process_time()
        for layer in range(36):
            run.decide(layer, seen[layer], 32)
        seconds.append(time.process_time() - start)
        run.end()
    assert min(seconds) < 0.05, f"{1e3 * min(seconds):.1f} ms"


@pytest.mark.slow
def test_logging_a_decision_costs_less_than_two_percent_of_a_step(tmp_path):
    """A decision every 5 steps of a small step (4 layers, 8 heads, 256 tokens) and its rows, by CPU time."""
    model = tiny_model("qwen3", hidden_size=128, intermediate_size=384, num_attention_heads=8, head_dim=16).train()
    windows = AdaptiveWindows(model, regime("full_adaptive", seq_len=256))
    ids, log, steps, logging = random_ids(4, 256), DecisionLog(tmp_path / "log.csv"), [], []
    for _ in range(20):
        start = time.process_time()
        with windows.step():
            model(input_ids=ids, labels=ids).loss.backward()
        steps.append(time.process_time() - start)
        start = time.process_time()
        if windows.run.decided:
            decisions = decisions_of(windows.run, windows.seq_len)
            summary(decisions)
            log.write(decisions)
            logging.append(time.process_time() - start)
    assert len(logging) == 4
    assert sorted(logging)[1] < 0.02 * 5 * sorted(steps)[10]
