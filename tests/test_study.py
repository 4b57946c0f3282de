"""`aah study`: the paper's experiment, here with decoders of a few thousand weights."""

from __future__ import annotations

import json

import pytest
from transformers import Trainer
from typer.testing import CliRunner

from aah_hf.calibration import REGIMES
from aah_hf.cli import app
from aah_hf.errors import AAHError
from aah_hf.study.config import PAPER, StudyConfig, preset
from aah_hf.study.data import decoder
from aah_hf.study.results import RunResult, findings, load_result, markdown, table
from aah_hf.study.run import run_study
from aah_hf.training.decisions import read_decisions

SMALL = {
    "regimes": ("full_attention", "shallow_freeze:control_interval=3"),
    "seeds": 1,
    "family": "qwen3",
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "width": 32,
    "intermediate": 32,
    "seq_len": 32,
    "batch_size": 2,
    "steps": 24,
    "eval_every": 8,
    "eval_sequences": 2,
    "warmup": 2,
    "vocab_size": 300,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file to train on: the default text would take its tokenizer longer than these decoders."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n".join(topics[name] for name in sorted(topics))[:30_000])
    return str(path)


def small(text, **changes) -> StudyConfig:
    return StudyConfig(**SMALL | {"data": text} | changes)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    return run_study(small(text), out, keep_models=True)


def test_a_study_leaves_a_table_pictures_and_the_decisions_of_every_run(finished):
    names = [run.regime for run in finished.results]
    assert names == list(SMALL["regimes"])
    full, frozen = finished.results
    assert full.acr == full.causal == 1.0 and full.windows == [[None] * 4] * 2
    assert 0.125 <= frozen.acr <= 1 and {w for layer in frozen.windows for w in layer} <= {4, 8, 16, None}
    assert [step for step, _ in full.curve] == [8, 16, 24]
    assert full.curve[-1][1] == pytest.approx(full.val_loss)
    assert full.train_tokens_per_s > 0 and full.infer_tokens_per_s > 0
    for name in ("table.md", "curves.png", "windows.png", "study.json", "tokenizer/tokenizer.json"):
        assert (finished.out / name).stat().st_size > 0
    folder = finished.out / "runs" / "shallow_freeze_control_interval=3-seed0"
    assert sorted({int(row["step"]) for row in read_decisions(folder / "decisions.csv")}) == list(range(0, 24, 3))
    assert not (folder / "checkpoints").exists(), "what is finished needs no checkpoint to go on from"
    assert (folder / "model" / "aah_controller.safetensors").exists()


def test_training_lowers_the_loss(finished):
    for run in finished.results:
        assert run.curve[-1][1] < run.curve[0][1]


def test_finished_runs_are_not_repeated(finished, text, monkeypatch):
    monkeypatch.setattr(Trainer, "train", lambda *args, **kwargs: pytest.fail("a finished run was trained again"))
    again = run_study(small(text), finished.out)
    assert again.results == finished.results


def test_equal_seeds_give_equal_weights_and_data_whatever_the_regime(text, tmp_path):
    """Windows that hide nothing must train like full attention, to the last digit of the loss."""
    wide = "fixed_window:fixed_window=32"
    study = run_study(small(text, regimes=("full_attention", wide), steps=8), tmp_path / "out")
    full, fixed = study.results
    assert fixed.val_loss == full.val_loss
    other = run_study(small(text, regimes=("full_attention",), steps=8, seeds=2), tmp_path / "two")
    assert other.results[0].val_loss == full.val_loss != other.results[1].val_loss


def test_a_killed_run_goes_on_and_ends_where_it_would_have_ended(finished, text, tmp_path):
    class Killed(BaseException):
        pass

    def kill(name, done, total):
        if name.startswith("shallow") and done == 15:
            raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed):
        run_study(small(text), out, progress=kill)
    frozen = out / "runs" / "shallow_freeze_control_interval=3-seed0"
    assert load_result(frozen) is None and (frozen / "checkpoints" / "checkpoint-10").exists()
    study = run_study(small(text), out)
    expected = finished.results[1]
    assert study.results[1].resumed_at == 10
    assert study.results[1].val_loss == expected.val_loss and study.results[1].windows == expected.windows
    assert study.results[1].curve == expected.curve
    theirs = finished.out / "runs" / frozen.name / "decisions.csv"
    assert (frozen / "decisions.csv").read_text() == theirs.read_text()


def test_other_settings_need_another_folder_but_more_regimes_and_seeds_do_not(finished, text):
    with pytest.raises(AAHError, match="another learning_rate, steps"):
        run_study(small(text, steps=30, learning_rate=1e-4), finished.out)
    more = run_study(small(text, regimes=(*SMALL["regimes"], "random_uniform")), finished.out)
    assert more.results[:2] == finished.results


def test_a_folder_with_something_else_is_left_alone(text, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(AAHError, match="holds no study"):
        run_study(small(text), tmp_path)


def test_a_damaged_result_is_a_clear_error(finished):
    folder = finished.out / "runs" / "full_attention-seed0"
    content = (folder / "result.json").read_text()
    try:
        (folder / "result.json").write_text(content[:40])
        with pytest.raises(AAHError, match="delete it"):
            load_result(folder)
    finally:
        (folder / "result.json").write_text(content)


def arguments_of(settings, text, out) -> list[str]:
    arguments = ["study", "--out", str(out), "--data", text]
    for key, value in settings.items():
        for part in value if key == "regimes" else (value,):
            arguments += ["--regime" if key == "regimes" else f"--{key.replace('_', '-')}", str(part)]
    return arguments


def test_the_command_prints_the_table_and_the_finding(finished, text):
    """Every setting has an option: the finished study is recognised, and only reported."""
    result = CliRunner().invoke(app, arguments_of(SMALL, text, finished.out))
    assert result.exit_code == 0, result.output
    for words in (
        "causal cov.",
        "tokens/s train",
        "shallow_freeze:control_interval=3",
        "With one seed there is no spread",
    ):
        assert words in result.output
    machine = CliRunner().invoke(app, [*arguments_of(SMALL, text, finished.out), "--json"])
    data = json.loads(machine.stdout)
    assert data["rows"]["full_attention"]["val_loss"] == [finished.results[0].val_loss, None]
    assert data["finding"] == findings(finished.results)


def test_the_command_ends_with_one_message_where_settings_are_wrong(finished, text):
    result = CliRunner().invoke(app, arguments_of(SMALL | {"steps": 30}, text, finished.out))
    assert result.exit_code == 2 and "another steps" in result.output and "Traceback" not in result.output


def test_unusable_data_claims_no_folder(tmp_path):
    config = StudyConfig(**SMALL, data=str(tmp_path / "nothing.txt"))
    with pytest.raises(AAHError):
        run_study(config, tmp_path / "study")
    assert not (tmp_path / "study").exists()


def run_of(regime, seed, loss) -> RunResult:
    return RunResult(regime, seed, loss, 0.5, 0.6, 0.7, 1000.0, 2000.0, [(1, loss)], [[8]], 1.0)


def study_of(**losses):
    return [run_of(regime, seed, loss) for regime, values in losses.items() for seed, loss in enumerate(values)]


def test_findings_are_computed_from_means_and_spreads():
    runs = study_of(full_attention=(4.0, 4.02), better=(3.90, 3.91), worse=(4.2, 4.21), same=(3.97, 4.03))
    text = findings(runs)
    assert "2 seeds" in text
    assert "lower for better (-0.1050) and higher for worse (+0.1950)" in text
    assert text.endswith("not distinguishable: same.")
    assert "different for no regime" in findings(study_of(full_attention=(4.0, 4.1), other=(4.05, 4.06)))


def test_findings_say_what_cannot_be_said():
    assert "With one seed there is no spread" in findings(study_of(full_attention=(4.0,), other=(1.0,)))
    assert "Without full_attention" in findings(study_of(one=(4.0, 4.0), two=(1.0, 1.0)))
    assert "nothing to compare" in findings(study_of(full_attention=(4.0, 4.1)))


def test_the_table_has_mean_and_sample_standard_deviation():
    rows = table(study_of(full_attention=(4.0, 4.2)))
    assert rows["full_attention"]["val_loss"].mean == pytest.approx(4.1)
    assert rows["full_attention"]["val_loss"].spread == pytest.approx(0.02**0.5)
    assert "| full_attention | 4.1000 ± 0.1414 |" in markdown(study_of(full_attention=(4.0, 4.2)))


def test_the_papers_configuration_is_the_papers():
    assert (PAPER.layers, PAPER.heads, PAPER.width, PAPER.seq_len, PAPER.steps) == (16, 12, 1536, 4096, 10_000)
    assert (PAPER.data, PAPER.tokenizer) == ("wikitext-2", "gpt2")
    assert PAPER.regime("shallow_freeze", 0).candidate_windows == (512, 1024, 2048, 4096)
    import torch

    with torch.device("meta"):
        parameters = decoder(PAPER, 50257, 0).num_parameters()
    assert 0.9e9 < parameters < 1.1e9


def test_the_default_compares_every_regime_and_control_with_two_seeds():
    assert StudyConfig().regimes == REGIMES and StudyConfig().seeds == 2


def test_settings_of_a_regime_are_read_from_its_name():
    config = StudyConfig()
    rules = config.regime("full_adaptive:control_interval=10,window_ema=0.3,parent_constraint=false,max_depth=2", 3)
    assert (rules.control_interval, rules.window_ema, rules.parent_constraint) == (10, 0.3, False)
    assert rules.grouping.max_depth == 2 and rules.seed == 3
    assert config.regime("shallow_freeze:candidate_windows=128-256-512", 0).candidate_windows == (128, 256, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regimes": ("full_atention",)}, "choose one of full_attention"),
        ({"regimes": ("full_adaptive:depth=2",)}, "no such setting"),
        ({"regimes": ("full_adaptive:max_depth",)}, "write setting=value"),
        ({"regimes": ()}, "at least one"),
        ({"family": "gpt2"}, "llama, qwen3"),
        ({"steps": 0}, "at least 1"),
        ({"width": 33}, "do not fit"),
        ({"heads": 4, "kv_heads": 3}, "do not fit"),
        ({"dtype": "float8"}, "float32, bfloat16"),
        ({"learning_rate": float("nan")}, "learning_rate"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(AAHError, match=message):
        StudyConfig(**SMALL | changes)


def test_missing_text_and_presets_are_refused(tmp_path):
    with pytest.raises(AAHError, match=r"existing \.txt or \.jsonl file"):
        run_study(StudyConfig(**SMALL | {"data": str(tmp_path / "none.txt")}), tmp_path / "out")
    with pytest.raises(AAHError, match="small, paper"):
        preset("huge")


def test_documents_of_a_jsonl_file_are_split_by_document(tmp_path):
    from aah_hf.study.data import texts

    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"document {i}"}) for i in range(20)))
    training, validation = texts(StudyConfig(**SMALL | {"data": str(path)}))
    assert validation == ["document 0", "document 10"] and len(training) == 18
