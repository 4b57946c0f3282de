"""Patched models are ordinary checkpoints: save, reload anywhere, override, and refuse what is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, LAYERS, mixed_plan, random_ids, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import aah_hf
from aah_hf import AAHAttention, AAHConfig, AAHError, PlanError, checkpoint, is_patched, patch_model, unpatch_model
from aah_hf.report.card import MARK


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture
def saved(tmp_path):
    """(directory, base logits, patched logits, ids) of a tiny patched llama."""
    model, ids = tiny_model(), random_ids(2, 40)
    base = logits(model, ids)
    patch_model(model, config=mixed_plan())
    model.save_pretrained(tmp_path)
    return tmp_path, base, logits(model, ids), ids


def edit_config(directory: Path, edit) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def test_config_json_names_the_plan_and_the_implementation(saved):
    directory, *_ = saved
    config = json.loads((directory / "config.json").read_text())
    assert config["attn_implementation"] == "aah"
    assert AAHConfig.from_dict(config["aah"]) == mixed_plan()
    assert config["model_type"] == "llama" and not list(directory.glob("*.bin")) and not list(directory.glob("*.pt"))


def test_a_new_process_needs_only_the_import(saved):
    directory, _, patched, ids = saved
    code = (
        "import sys, json, torch, aah_hf\n"
        "from transformers import AutoModelForCausalLM\n"
        "torch.set_num_threads(1)\n"  # as in this process: sums over threads round differently
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = torch.tensor(json.loads(sys.argv[2]))\n"
        "from safetensors.torch import save_file\n"
        "save_file({'logits': m(ids).logits.detach()}, sys.argv[3])\n"
        "print(m.config._attn_implementation, [type(l.self_attn).__name__ for l in m.model.layers])\n"
    )
    out = directory / "logits.safetensors"
    result = subprocess.run(
        [sys.executable, "-c", code, str(directory), json.dumps(ids.tolist()), str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    from safetensors.torch import load_file

    assert torch.equal(load_file(out)["logits"], patched)
    assert result.stdout.split() == ["aah", *str(["AAHLlamaAttention"] * LAYERS).split()]


def test_without_aah_hf_loading_fails_loudly(saved):
    directory, *_ = saved
    code = (
        "import sys\nfrom transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained(sys.argv[1])"
    )
    result = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True)
    assert result.returncode != 0 and "aah" in result.stderr.splitlines()[-1]


def test_every_family_reloads_bit_for_bit(family_model, tmp_path):
    ids = random_ids(1, 40)
    patch_model(family_model, config=mixed_plan())
    want = logits(family_model, ids)
    family_model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), want)
    assert list(again.state_dict()) == list(family_model.state_dict())


def test_every_family_reloads_bit_for_bit_in_a_new_process(tmp_path):
    ids, want = random_ids(1, 40), {}
    for name, model_type, overrides in FAMILIES:
        model = patch_model(tiny_model(model_type, **overrides), config=mixed_plan())
        model.save_pretrained(tmp_path / name)
        want[name] = logits(model, ids)
    code = (
        "import sys, json, torch, aah_hf\n"
        "from safetensors.torch import save_file\n"
        "from transformers import AutoModelForCausalLM\n"
        "torch.set_num_threads(1)\n"
        "folder, ids, *names = sys.argv[1:]\n"
        "ids = torch.tensor(json.loads(ids))\n"
        "models = {n: AutoModelForCausalLM.from_pretrained(f'{folder}/{n}') for n in names}\n"
        "assert all(aah_hf.is_patched(m) for m in models.values())\n"
        "save_file({n: m(ids).logits.detach() for n, m in models.items()}, f'{folder}/out.safetensors')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), json.dumps(ids.tolist()), *want], check=True)
    from safetensors.torch import load_file

    got = load_file(tmp_path / "out.safetensors")
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("row", FAMILIES, ids=[row[0] for row in FAMILIES])
def test_a_loaded_model_of_every_family_can_be_unpatched(row, tmp_path):
    """gemma2 and gpt_oss have no SDPA: they return to eager attention."""
    model, ids = tiny_model(row[1], **row[2]), random_ids(1, 40)
    base, implementation = logits(model, ids), model.config._attn_implementation
    patch_model(model, config=mixed_plan()).save_pretrained(tmp_path)
    loaded = unpatch_model(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.config._attn_implementation == implementation
    assert torch.equal(logits(loaded, ids), base)
    assert f'attn_implementation="{implementation}"' in (tmp_path / "README.md").read_text()
    dormant = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
    assert torch.equal(logits(dormant, ids), base)


def test_sharded_device_map_and_dtype_loads(saved, tmp_path_factory):
    directory, _, patched, ids = saved
    model = AutoModelForCausalLM.from_pretrained(directory)
    shards = tmp_path_factory.mktemp("shards")
    model.save_pretrained(shards, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(shards), ids), patched)
    for device_map in ("cpu", "auto", {"": "cpu"}):
        mapped = AutoModelForCausalLM.from_pretrained(shards, device_map=device_map)
        assert torch.equal(logits(mapped, ids), patched)
    half = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and is_patched(half)
    torch.testing.assert_close(logits(half, ids).float(), patched, rtol=0.1, atol=0.03)


def test_offloaded_layers_keep_their_windows(saved, tmp_path_factory):
    """accelerate's hooks replace `forward` and move arguments: the windows must survive both."""
    directory, _, patched, ids = saved
    names = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    names |= {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(LAYERS)}
    model = AutoModelForCausalLM.from_pretrained(
        directory, device_map=names, offload_folder=tmp_path_factory.mktemp("offload")
    )
    assert torch.equal(logits(model, ids), patched)


def test_sdpa_override_gives_the_base_model_and_can_be_patched_again(saved):
    directory, base, patched, ids = saved
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    assert torch.equal(logits(model, ids), base)
    assert not any(isinstance(m, AAHAttention) for m in model.modules())
    patch_model(model, config=AAHConfig.from_model(model))
    assert torch.equal(logits(model, ids), patched)


def test_an_explicit_sdpa_stays_through_saving(saved, tmp_path_factory):
    directory, base, _, ids = saved
    other = tmp_path_factory.mktemp("other")
    AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").save_pretrained(other)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(other), ids), base)


def test_headless_models_get_their_windows_too(saved):
    directory, _, _, ids = saved
    model = AutoModel.from_pretrained(directory)
    full = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, full.model(ids).last_hidden_state)
    assert sum(isinstance(m, AAHAttention) for m in model.modules()) == LAYERS


def test_a_lost_key_is_restored_with_a_warning(saved, monkeypatch):
    directory, base, patched, ids = saved
    edit_config(directory, lambda c: c.pop("attn_implementation"))
    warnings = []
    monkeypatch.setattr(checkpoint.logger, "warning", warnings.append)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(logits(model, ids), patched)
    assert len(warnings) == 1 and "re-saved without aah_hf" in warnings[0]
    explicit = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    assert torch.equal(logits(explicit, ids), base)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["aah"]["windows"][0].__setitem__(0, 0), r"windows\[0\]\[0\]"),
        (lambda c: c["aah"]["windows"][1].__setitem__(2, "7"), r"windows\[1\]\[2\]"),
        (lambda c: c["aah"]["windows"].pop(), "belongs to another model"),
        (lambda c: c["aah"]["windows"][0].pop(), "belongs to another model"),
        (lambda c: c["aah"].pop("sink_tokens"), "sink_tokens"),
        (lambda c: c["aah"].update(version=99), "pip install -U"),
        (lambda c: c["aah"].update(surprise=1), "unknown entries"),
        (lambda c: c.update(aah=[1, 2]), "JSON object"),
        (lambda c: c.update(aah="x" * 100), "JSON object"),
        (lambda c: c.pop("aah"), "holds no plan"),
        (lambda c: c.update(attn_implementation=5), "`attn_implementation` in config.json is 5"),
        (lambda c: c.update(attn_implementation=True), "is True"),
        (lambda c: c.update(attn_implementation=["aah"]), r"is \['aah'\]"),
        (lambda c: c.update(attn_implementation={"": "aah"}), "edited by hand"),
        (lambda c: c.update(attn_implementation=""), "is ''; expected 'aah'"),
        (lambda c: c.update(num_hidden_layers=LAYERS + 1), "belongs to another model"),
    ],
)
def test_a_damaged_plan_is_refused_before_weights_load(saved, edit, message, monkeypatch):
    directory, *_ = saved
    edit_config(directory, edit)
    monkeypatch.setattr("safetensors.safe_open", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(PlanError, match=message):
        AutoModelForCausalLM.from_pretrained(directory)


def test_a_truncated_config_is_a_clear_error(saved):
    directory, *_ = saved
    path = directory / "config.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(OSError, match="not a valid JSON file"):
        AutoModelForCausalLM.from_pretrained(directory)


def test_asking_for_aah_without_a_plan_says_what_to_do(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(AAHError, match="patch_model"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="aah")


def test_a_config_with_a_plan_builds_a_patched_model(saved):
    directory, *_ = saved
    config = AutoConfig.from_pretrained(directory)
    assert is_patched(AutoModelForCausalLM.from_config(config))
    assert aah_hf.coverage(config, 64).causal < 1.0


def test_save_writes_a_card_and_never_over_somebody_elses(saved):
    directory, *_ = saved
    card = directory / "README.md"
    text = card.read_text()
    assert MARK in text and "library_name: transformers" in text and "import aah_hf" in text
    model = AutoModelForCausalLM.from_pretrained(directory)
    card.write_text("mine")
    model.save_pretrained(directory)
    assert card.read_text() == "mine"


def test_the_card_of_a_strangers_plan_cannot_inject_markup(tmp_path):
    plan = mixed_plan().with_provenance(
        **{"<script>": "[x](http://e.vil)\n# head | `code`", "check": {"kl": "{{ 7*7 }}<b>"}}
    )
    model = patch_model(tiny_model(), config=plan)
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert (
        "<script>" not in text
        and "<b>" not in text
        and "[x](" not in text
        and "\n# head" not in text
        and "49" not in text
    )


def test_hooks_can_be_removed_and_installed_again(tmp_path):
    from transformers import PreTrainedConfig

    from aah_hf import hooks

    installed = PreTrainedConfig.to_dict
    hooks.install()
    assert PreTrainedConfig.to_dict is installed
    hooks.remove()
    try:
        assert PreTrainedConfig.to_dict is installed.__aah_original__
        assert not any(hasattr(getattr(h.owner, h.name), "__aah_original__") for h in hooks.HOOKS)
    finally:
        hooks.install()
    model = patch_model(tiny_model(), config=mixed_plan())
    model.save_pretrained(tmp_path)
    assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_hook_whose_target_changed_is_an_error_that_names_it(monkeypatch):
    from aah_hf import hooks

    class Changed:
        def to_dict(this): ...

    bad = hooks.Hook(Changed, "to_dict", lambda o, s: None, ("self",), "a test")
    monkeypatch.setattr(hooks, "HOOKS", (bad,))
    with pytest.raises(AAHError, match=r"Changed.to_dict.*no longer takes \['self'\]"):
        hooks.install()


def test_a_plan_edited_in_place_is_not_saved(tmp_path):
    model = patch_model(tiny_model(), config=mixed_plan())
    model.config.aah["windows"][0][0] = 7
    with pytest.raises(PlanError, match="cannot be edited in place"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_card_that_cannot_be_written_does_not_fail_the_save(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(checkpoint.logger, "warning", warnings.append)
    (tmp_path / "README.md").mkdir()
    patch_model(tiny_model(), config=mixed_plan()).save_pretrained(tmp_path)
    assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path)) and "model card was not" in warnings[0]


def test_saving_an_unpatched_model_removes_our_card(saved):
    directory, *_ = saved
    unpatch_model(AutoModelForCausalLM.from_pretrained(directory)).save_pretrained(directory)
    assert not (directory / "README.md").exists()


def test_a_second_implementation_key_is_refused(tmp_path):
    patch_model(tiny_model(), config=mixed_plan()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"_attn_implementation": "sdpa"}))
    with pytest.raises(PlanError, match="_attn_implementation"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
