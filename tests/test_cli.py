"""The command line, on a tiny checkpoint with a tokenizer of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import aah_hf
from aah_hf.cli import app

SEQ = ["--seq-len", "256"]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """(calibration file, evaluation file): two halves of Python's documentation."""
    from aah_hf.demo import documentation

    folder = tmp_path_factory.mktemp("text")
    calibration, held_out = documentation()
    (folder / "calib.txt").write_text("\n".join(calibration)[:60_000], encoding="utf-8")
    rows = [json.dumps({"text": text}) for text in held_out[:6]]
    (folder / "eval.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder / "calib.txt", folder / "eval.jsonl"


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Directory of a tiny llama with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("base")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    tiny_model(vocab_size=len(vocabulary)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def patched(base, texts, tmp_path_factory):
    """(directory, printed JSON) of `aah patch`."""
    folder = tmp_path_factory.mktemp("patched") / "model"
    result = aah(
        "patch", base, "--calib", texts[0], "--budget", "0.5", "--out", folder, "--sequences", "2", *SEQ, "--json"
    )
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def aah(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_patch_saves_a_checkpoint_card_and_picture(patched):
    folder, summary = patched
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "windows.png", "tokenizer.json"} <= names
    assert not [path for path in folder.parent.iterdir() if path != folder]  # nothing half-written left behind
    at_length = next(c for c in summary["coverage"] if c["seq_len"] == 256)
    assert at_length["causal"] <= 0.5
    assert summary["provenance"]["budget"] == {"kind": "causal", "value": 0.5}
    assert "check" in summary["provenance"]
    assert aah_hf.is_patched(AutoModelForCausalLM.from_pretrained(folder))


def test_eval_prints_the_promised_object(patched, texts):
    result = aah("eval", patched[0], "--text", texts[1], "--sequences", "2", "--recall", "2", *SEQ, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    keys = "ppl base_ppl increase increase_ci95 kl recall_nll base_recall_nll coverage kv_bytes seconds base_seconds tokens"
    assert set(keys.split()) <= set(data)
    assert set(data["coverage"]) == {"acr", "causal", "kv"}
    assert data["tokens"] == 4 * 128 and data["increase_ci95"][0] <= data["increase"] <= data["increase_ci95"][1]
    assert data["kl"] > 0


def test_eval_of_full_windows_finds_no_difference(patched, texts):
    result = aah("eval", patched[0], "--windows", "uniform:256", "--text", texts[1], "--sequences", "1", *SEQ, "--json")
    data = json.loads(result.stdout)
    assert data["increase"] == 0 and data["kl"] == 0 and data["coverage"]["causal"] == 1


def test_eval_against_another_base_and_of_shuffled_windows(patched, base):
    for extra in (["--against", base], ["--windows", "shuffled:3"]):
        result = aah("eval", patched[0], "--recall", "1", *extra, *SEQ, "--json")
        assert result.exit_code == 0, result.output
    plain = aah("eval", patched[0], "--recall", "1", *SEQ)
    assert plain.exit_code == 0 and "loss of recalled answers" in plain.output


def test_info_of_a_plan_needs_no_weights(patched, tmp_path):
    folder, summary = patched
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    result = aah("info", tmp_path, "--plot", tmp_path / "w.png", "--json")
    assert json.loads(result.stdout)["windows"] == summary["windows"]
    assert (tmp_path / "w.png").read_bytes()[:4] == b"\x89PNG"
    assert "Coverage" in aah("info", tmp_path).output


def test_info_of_the_installation_names_the_backend():
    data = json.loads(aah("info", "--json").stdout)
    assert data["torch"] == torch.__version__ and "llama" in data["families"] and data["backend"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["patch", "{base}", "--calib", "nowhere.txt", "--out", "{tmp}/x"], "nowhere.txt does not exist"),
        (["patch", "{base}", "--calib", "{calib}", "--out", "{tmp}/x", "--budget", "much"], "budget is 'much'"),
        (["patch", "{base}", "--calib", "{calib}", "--out", "{tmp}/x", "--budget", "7"], "budget is 7.0"),
        (["patch", "{base}", "--calib", "{calib}", "--out", "{tmp}/x", "--budget", "kg:0.5"], "budget kind is 'kg'"),
        (["patch", "{base}", "--calib", "{calib}", "--out", "{tmp}/x", "--candidates", "a,b"], "candidates are 'a,b'"),
        (["patch", "{base}", "--calib", "{calib}", "--out", "{tmp}/x", "--dtype", "int3"], "dtype is 'int3'"),
        (["patch", "{base}", "--calib", "{calib}", "--out", "{base}"], "exists and is not empty"),
        (["patch", "{base}", "--calib", "{calib}", "--out", "{tmp}/x", "--budget", "0.01"], "Raise the budget"),
        (["patch", "{tmp}/none", "--calib", "{calib}", "--out", "{tmp}/x"], "none"),
        (["info", "{base}"], "carries no plan"),
        (["eval", "{base}"], "carries no plan"),
        (["eval", "{base}", "--recall", "0"], "nothing to score"),
        (["eval", "{base}", "--windows", "triangular:4"], "triangular:4"),
        (["eval", "{base}", "--windows", "shuffled:4"], "carries no plan"),
        (["eval", "{base}", "--text", "nowhere.txt"], "nowhere.txt does not exist"),
    ],
)
def test_user_errors_exit_2_without_a_traceback(arguments, message, base, texts, tmp_path):
    places = {"base": base, "calib": texts[0], "tmp": tmp_path}
    result = aah(*[a.format(**places) for a in arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split()) and "Traceback" not in result.output
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".x-*"))


def test_debug_shows_the_traceback(base):
    assert isinstance(aah("info", base, "--debug").exception, aah_hf.PlanError)


@pytest.mark.parametrize("command", ["demo", "patch", "info", "eval"])
def test_help_explains_every_option(command):
    result = aah(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.output


def test_the_script_is_installed_and_prints_json_only_on_stdout(patched):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "aah_hf.cli", "info", str(patched[0]), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(result.stdout)["layers"] == 3


def test_a_failed_save_leaves_what_stood_there(patched, base, texts, monkeypatch):
    before = {path.name: path.read_bytes() for path in patched[0].iterdir()}
    monkeypatch.setattr("aah_hf.report.plots.plot_windows", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    result = aah(
        "patch", base, "--calib", texts[0], "--budget", "0.9", "--out", patched[0], "--force", "--sequences", "2", *SEQ
    )
    assert result.exit_code == 2 and "disk full" in result.output
    assert before == {path.name: path.read_bytes() for path in patched[0].iterdir()}
    assert len(list(patched[0].parent.iterdir())) == 1


def test_bench_generate_prints_a_table_and_json(patched):
    folder, _ = patched
    asked = ("bench", "generate", folder, "--batch", "2", "--context", "64", "--new-tokens", "3", "--repeats", "1")
    row = json.loads(aah(*asked, "--json").stdout)["rows"][0]
    assert (row["batch"], row["context"], row["new_tokens"]) == (2, 64, 3)
    table = aah(*asked)
    assert table.exit_code == 0 and "DynamicCache" in table.output


def test_patch_with_a_kv_budget(base, texts, tmp_path):
    asked = ("patch", base, "--calib", texts[0], "--sequences", "2", *SEQ)
    done = aah(*asked, "--kv-budget", "120kB", "--kv-at", "1000", "--out", tmp_path / "a", "--json")
    assert done.exit_code == 0, done.output
    assert aah_hf.coverage(AutoModelForCausalLM.from_pretrained(tmp_path / "a"), 1000).kv_bytes <= 120_000
    for wrong in (("--kv-budget", "0.5", "--budget", "0.5"), ("--kv-budget", "0.5", "--kv-at", "9"), ("--kv-at", "9")):
        result = aah(*asked, *wrong, "--out", tmp_path / "b")
        assert result.exit_code == 2 and "--kv-" in result.output
