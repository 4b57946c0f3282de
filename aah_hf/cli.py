"""`aah`: the command line. Every command is a thin layer over the Python API."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .errors import AAHError

app = typer.Typer(
    name="aah",
    help="Asymmetric attention heads for Hugging Face models: calibrate, patch, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
out = Console(width=None if sys.stdout.isatty() else 140)  # a table in a file is not squeezed to 80 columns
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[str, typer.Argument(help="Model directory, Hub name, .gguf file, or `smollm2` (the demo's model).")]
SeqLen = Annotated[int, typer.Option(help="Tokens per sequence.", min=16)]


def user_errors(command: Callable) -> Callable:
    """Errors that a user can mend end with one message and exit code 2; `--debug` shows where they come from."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (AAHError, OSError) as error:
            if kwargs.get("debug"):
                raise
            err.print("Error:", style="bold red", end=" ")
            err.print(str(error), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None

    return run


@app.command()
@user_errors
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Where the checkpoint goes.")] = Path("aah-demo"),
    seq_len: SeqLen = 2048,
    budget: Annotated[float, typer.Option(help="Causal coverage that the windows may use.")] = 0.46,
    sequences: Annotated[int, typer.Option(help="Held-out sequences scored, of each kind of text.", min=1)] = 2,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Calibrate, patch, measure, save, reload and run SmolLM2-135M: the whole way in under five minutes."""
    from .demo import run_demo

    _quiet()
    with _progress() as progress:
        result = run_demo(
            out_dir,
            seq_len=seq_len,
            budget=budget,
            sequences=sequences,
            progress=progress.update,
            say=lambda text: err.print(f"[bold]•[/] {text}"),
        )
    if json_output:
        _print_json(result.to_dict())
    else:
        _demo_tables(result)
    if not result.reloaded_equal:
        raise AAHError("the reloaded checkpoint gave other logits; please report this.")


@app.command()
@user_errors
def patch(
    model: Model,
    calib: Annotated[Path, typer.Option(help="Text to calibrate on: .txt, or .jsonl with a `text` field.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Directory for the patched checkpoint.")],
    budget: Annotated[
        str, typer.Option(help="Coverage to stay within: 0.46 (causal), or causal:X, acr:X, kv:X.")
    ] = "kv:0.5",
    granularity: Annotated[
        str | None,
        typer.Option(help="What shares a window: head, kv_head or layer. Default: head, and kv_head for kv budgets."),
    ] = None,
    candidates: Annotated[
        str, typer.Option(help="Windows to choose from: fine, coarse, or numbers like 128,512,1024.")
    ] = "fine",
    seq_len: SeqLen = 2048,
    sequences: Annotated[int, typer.Option(help="Calibration sequences, recall text included.", min=1)] = 4,
    sink_tokens: Annotated[int, typer.Option(help="First tokens that stay visible.", min=0)] = 4,
    seed: Annotated[int, typer.Option(help="Of the recall text.", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace what stands in --out.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Calibrate windows for a model and save the patched checkpoint."""
    from .calibration import CalibrationConfig
    from .patching import patch_model
    from .plan import AAHConfig
    from .report.plots import plot_windows

    if out_dir.exists() and not force and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise AAHError(f"{out_dir} exists and is not empty; choose another --out, or --force to replace it.")
    limit = _budget(budget)
    config = CalibrationConfig(
        budget=limit,
        granularity=granularity or ("kv_head" if limit.kind == "kv" else "head"),
        candidates=_candidates(candidates),
        seq_len=seq_len,
        num_sequences=sequences,
        sink_tokens=sink_tokens,
        seed=seed,
    )
    if not calib.exists():
        raise AAHError(f"the calibration file {calib} does not exist.")
    _quiet()
    loaded, tokenizer = _load(model, dtype)
    with _progress() as progress:
        patch_model(loaded, str(calib), calibration=config, tokenizer=tokenizer, progress=progress.update)
    with _replacing(out_dir) as folder:
        loaded.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        plot_windows(AAHConfig.from_model(loaded), folder / "windows.png")
    summary = _describe(loaded, out_dir)
    if json_output:
        _print_json(summary)
    else:
        _print_description(summary)
        out.print(f"Saved to [bold]{out_dir}[/]; its README.md is the model card, windows.png the picture.")


@app.command()
@user_errors
def info(
    model: Annotated[
        str | None, typer.Argument(help="Model directory or Hub name; nothing for this installation.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the windows into this file.")] = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """What is installed and which backend runs; or what a model's plan looks like (no weights are loaded)."""
    if model is None:
        summary = _installation()
        if json_output:
            _print_json(summary)
            return
        table = Table(show_header=False, box=None)
        for name, value in (summary | {f"native {k}": v for k, v in summary.pop("native").items()}).items():
            table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
        out.print(table)
        return
    from transformers import AutoConfig

    from .plan import AAHConfig
    from .report.plots import plot_windows

    _quiet()
    config = _friendly(lambda: AutoConfig.from_pretrained(model), model)
    summary = _describe(config, model)
    if plot is not None:
        plot_windows(AAHConfig.from_model(config), plot)
    if json_output:
        _print_json(summary)
    else:
        _print_description(summary)


@app.command("eval")
@user_errors
def evaluate_command(
    model: Model,
    text: Annotated[list[Path] | None, typer.Option(help="Held-out text, .txt or .jsonl; may be repeated.")] = None,
    seq_len: SeqLen = 2048,
    sequences: Annotated[int, typer.Option(help="Sequences of the text to score, at most.", min=1)] = 16,
    recall: Annotated[int, typer.Option(help="Sequences of built-in recall text to score.", min=0)] = 16,
    against: Annotated[str | None, typer.Option(help="Base model; default: the same weights, full attention.")] = None,
    windows: Annotated[
        str | None, typer.Option(help="Control: uniform:W or shuffled:SEED instead of the model's windows.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Perplexity, KL, recall and time against full attention, on the second half of each sequence."""
    from .calibration import recall_sequences, token_sequences
    from .evaluation import control_plan, evaluate
    from .patching import patch_model
    from .plan import plan_of

    if not text and not recall:
        raise AAHError("there is nothing to score: give --text FILE, or --recall N for built-in recall text.")
    for path in text or []:
        if not path.exists():
            raise AAHError(f"the text file {path} does not exist.")
    _quiet()
    loaded, tokenizer = _load(model, dtype)
    if windows is not None:
        patch_model(loaded, config=control_plan(loaded, windows))
    if plan_of(loaded) is None and against is None:
        raise AAHError(f"{model} carries no plan, so there is nothing to compare; use --windows, or --against BASE.")
    vocabulary = loaded.get_input_embeddings().num_embeddings
    scored: list = []
    for path in text or []:
        scored += token_sequences(
            str(path), seq_len=seq_len, tokenizer=tokenizer, vocab_size=vocabulary, at_most=sequences - len(scored)
        )
        if len(scored) >= sequences:
            break
    asked = [(r.ids, r.answers) for r in recall_sequences(tokenizer, recall, seq_len=seq_len, split="evaluation")]
    base = _load(against, dtype)[0] if against else None
    with _progress() as progress:
        result = evaluate(loaded, scored, asked, base=base, progress=progress.update)
    data = result.to_dict()
    if json_output:
        _print_json(data)
        return
    table = Table("", "patched", "full attention", title=f"{model}, {seq_len} tokens, second half scored")
    if result.text:
        table.add_row("perplexity of the text", f"{result.text.ppl:.3f}", f"{result.text.base_ppl:.3f}")
        table.add_row("  increase, mean per sequence", _increase(result.text), "")
        table.add_row("  KL to full attention", f"{result.text.kl:.4f} nats/token", "")
    if result.recall:
        table.add_row("perplexity of recall text", f"{result.recall.ppl:.3f}", f"{result.recall.base_ppl:.3f}")
        table.add_row("  increase, mean per sequence", _increase(result.recall), "")
        if result.recall.recall_nll is not None:
            table.add_row(
                "  loss of recalled answers",
                f"{result.recall.recall_nll:.3f} nats/token",
                f"{result.recall.base_recall_nll:.3f} nats/token",
            )
    table.add_row("ACR / causal / KV coverage", _coverages(data["coverage"]), "1 / 1 / 1")
    table.add_row("seconds per sequence", f"{data['seconds']:.2f}", f"{data['base_seconds']:.2f}")
    out.print(table)


@app.command()
@user_errors
def build(
    force: Annotated[bool, typer.Option("--force", help="Compile again even if a good library is there.")] = False,
    cuda: Annotated[
        bool | None, typer.Option("--cuda/--no-cuda", help="Code for GPUs. Default: where nvcc is found.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="GPUs to compile for: native, or compute capabilities like 90,100. Default: 8.0 to 12.0."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at a time. Default AAH_HF_BUILD_JOBS, or the processors.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the compiler commands and messages.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Compile the native operator into this user's cache: for CPUs by g++ or clang++, for GPUs too where nvcc is."""
    from .ops import build as native_build
    from .ops import native, recipes, toolchain

    recipe = recipes.default_recipe()
    if cuda or arch is not None or (cuda is None and toolchain.find_nvcc() is not None):
        if cuda is False:
            raise AAHError("--arch names GPUs and --no-cuda leaves them out; give one of the two.")
        recipe = recipes.with_cuda(recipe, arch)
    with _progress() as progress:
        path = native_build.build(
            recipe=recipe,
            verbose=verbose,
            force=force,
            jobs=jobs,
            progress=lambda done, total, label: progress.update("compiling", done, total),
        )
    status = native.status(build_now=True)
    gpus = None if recipe.cuda is None else list(recipe.cuda.targets)
    if json_output:
        facts = {"isa": status.isa, "cuda": gpus, "available": status.available, "reason": status.reason}
        _print_json({"path": str(path), **facts})
        return
    if gpus is not None:
        what = f"GPUs of compute capability {', '.join(gpus)} and newer"
    else:
        what = "no GPU code" + ("" if cuda is False else f": no nvcc was found; to add it, {toolchain.GET_NVCC}")
    out.print(f"Built {path} ({status.isa}; {what}).", highlight=False, soft_wrap=True)


bench = typer.Typer(help="Benchmarks: interleaved repeats in one process, medians as ratios.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("ops")
@user_errors
def bench_ops_command(
    seq_len: Annotated[
        list[int] | None, typer.Option(help="Lengths; may be repeated. Default 1024, 2048, 4096.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="query/KV heads x head size: 9/3x64, 8/2x128.")] = None,
    windows: Annotated[
        list[str] | None, typer.Option(help="Window mixes: full, 128-full, 64-full, 512-full, 256.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, float64, bfloat16, float16.")] = None,
    direction: Annotated[list[str] | None, typer.Option(help="forward, backward.")] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="sdpa_causal, sdpa_mask, flex, eager, aah. Default: all.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Windowed attention against SDPA, SDPA with a mask, FlexAttention and our pure PyTorch operator."""
    from .bench import PEERS, bench_ops, call_overhead

    with _progress() as progress:
        rows = list(
            bench_ops(
                shapes=shape or ("9/3x64",),
                seq_lens=seq_len or (1024, 2048, 4096),
                mixes=windows or ("full", "128-full"),
                dtypes=dtype or ("float32",),
                directions=direction or ("forward", "backward"),
                peers=peer or PEERS,
                repeats=repeats,
                device=device,
                progress=progress.update,
            )
        )
    overhead = call_overhead()
    if json_output:
        _print_json({"rows": [row.to_dict() for row in rows], "call_overhead_us": overhead, **_installation()})
        return
    names = [name for name in PEERS if any(name in row.milliseconds for row in rows)]
    table = Table("shape", "tokens", "windows", "dtype", "direction", "coverage", *names, title="median ms")
    for row in rows:
        times = (f"{row.milliseconds[n]:.2f}" if n in row.milliseconds else "–" for n in names)
        table.add_row(row.shape, str(row.seq_len), row.windows, row.dtype, row.direction, f"{row.coverage:.3f}", *times)
    out.print(table)
    if overhead:
        out.print("One-query call, µs: " + ", ".join(f"{k} {v:.1f}" for k, v in overhead.items()), highlight=False)


def main() -> None:
    """Entry point of the `aah` script."""
    app()


# --- helpers ---------------------------------------------------------------------------------------------------


class _Bars:
    """Turns (stage, done, total) calls into progress bars on stderr, a bar per stage."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.tasks: dict[str, Any] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        task = self.tasks.get(stage)
        if task is None or self.bars.tasks[task].finished:
            task = self.tasks[stage] = self.bars.add_task(stage, total=total)
        self.bars.update(task, completed=done, total=total)


@contextmanager
def _progress() -> Iterator[_Bars]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err) as bars:
        yield _Bars(bars)


def _quiet() -> None:
    """transformers' own bars and notes would break ours and JSON on stdout; its warnings stay."""
    from transformers.utils import logging

    logging.set_verbosity_warning()
    logging.disable_progress_bar()


def _load(model: str, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise AAHError(f"dtype is {dtype!r}; choose float32, bfloat16, float16 or auto.")
    with err.status(f"Loading {model}"):
        if model == "smollm2":
            from .demo import load_smollm2

            loaded, tokenizer = load_smollm2()
            return loaded if dtype in ("auto", "float32") else loaded.to(getattr(torch, dtype)), tokenizer
        where, extra = model, {}
        if model.endswith(".gguf"):
            where, extra = str(Path(model).parent), {"gguf_file": Path(model).name}

        def load() -> tuple[Any, Any]:
            kind = dtype if dtype == "auto" else getattr(torch, dtype)
            loaded = AutoModelForCausalLM.from_pretrained(where, dtype=kind, **extra)
            return loaded.eval(), AutoTokenizer.from_pretrained(where, **extra)

        return _friendly(load, model)


def _friendly(load: Callable[[], Any], model: str) -> Any:
    """Loading errors of transformers that a user can mend, without their traceback."""
    try:
        return load()
    except (AAHError, OSError):
        raise
    except (ValueError, KeyError, ImportError) as error:
        raise AAHError(f"{model} cannot be loaded: {error}") from error


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Write into a new directory beside `folder` and put it in place at the end: never a half-written checkpoint."""
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield fresh
        fresh.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        os.replace(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _budget(text: str) -> Any:
    from .calibration import Budget

    kind, _, value = text.rpartition(":")
    try:
        number = float(value)
    except ValueError:
        raise AAHError(
            f"budget is {text!r}; expected a coverage such as 0.46, causal:0.46, acr:0.3 or kv:0.5."
        ) from None
    return Budget(kind or "causal", number)


def _candidates(text: str) -> str | tuple[int, ...]:
    if text in ("fine", "coarse"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise AAHError(f"candidates are {text!r}; expected fine, coarse, or numbers like 128,512,1024.") from None


def _installation() -> dict[str, Any]:
    import torch
    import transformers

    from . import __version__
    from .families import FAMILIES
    from .ops.native import status

    native = status()
    return {
        "aah_hf": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "backend": f"native on CPU ({native.isa})" if native.available else "pure PyTorch (banded), no native operator",
        "backend on GPUs": _gpu_backend(native),
        "native": vars(native),
        "families": sorted(FAMILIES),
    }


def _gpu_backend(native: Any) -> str:
    import torch

    if native.cuda is None:
        return "pure PyTorch (banded); `aah build` adds the CUDA kernel where it finds nvcc"
    what = f"CUDA kernel for compute capability {native.cuda['targets'].replace(',', ', ')} and newer"
    if not torch.cuda.is_available():
        where = "no GPU here"
    else:
        from .ops import gpu

        missing = gpu.missing(torch.cuda.current_device())
        where = f"used on {torch.cuda.get_device_name()}" if missing is None else f"not used: {missing}"
    return f"{what} ({where}). {UNPROVEN}"


UNPROVEN = "It is verified by emulation and has not yet run on hardware: check yours with tests/gpu/check.py."


def _describe(model: Any, name: Any) -> dict[str, Any]:
    """A plan as plain JSON: windows, coverage at several lengths, provenance."""
    from .plan import AAHConfig, coverage_of, text_config

    plan = AAHConfig.from_model(model)
    plan.check_fits(model)
    lengths = sorted({plan.calibrated_at or 2048, 4096, 8192, 32768})
    return {
        "model": str(name),
        "model_type": text_config(model).model_type,
        "attn_implementation": text_config(model)._attn_implementation,
        "layers": plan.num_layers,
        "query_heads": plan.num_heads,
        "sink_tokens": plan.sink_tokens,
        "windows": [list(layer) for layer in plan.windows],
        "coverage": [coverage_of(plan, model, n).to_dict() for n in lengths],
        "provenance": dict(plan.provenance),
    }


def _print_description(summary: dict[str, Any]) -> None:
    from .attention import LayerWindows

    layers = Table("layer", "windows × query heads", title=f"{summary['model']} ({summary['model_type']})")
    for index, windows in enumerate(summary["windows"]):
        layers.add_row(str(index), str(LayerWindows(tuple(windows), summary["sink_tokens"])))
    out.print(layers)
    table = Table("tokens", "ACR", "causal", "KV", "KV cache", title=f"Coverage, {summary['sink_tokens']} sink tokens")
    for c in summary["coverage"]:
        table.add_row(str(c["seq_len"]), *(f"{c[k]:.3f}" for k in ("acr", "causal", "kv")), _bytes(c["kv_bytes"]))
    out.print(table)
    check = summary["provenance"].get("check")
    if isinstance(check, dict):
        facts = ", ".join(f"{k} {v:.4g}" for k, v in check.items() if isinstance(v, (int, float)))
        out.print("Measured on held-out text:", facts, highlight=False, markup=False)


def _demo_tables(result: Any) -> None:
    names = list(result.rows)
    table = Table("", "full attention", *names, title="Held-out text, second half of each sequence scored")
    first = result.rows[names[0]]
    rows = result.rows.values()
    table.add_row("perplexity, documentation", f"{first.text.base_ppl:.3f}", *(f"{r.text.ppl:.3f}" for r in rows))
    table.add_row("  increase (95 % interval)", "", *(_increase(r.text) for r in rows))
    table.add_row("  KL, nats/token", "", *(f"{r.text.kl:.4f}" for r in rows))
    table.add_row("perplexity, recall text", f"{first.recall.base_ppl:.3f}", *(f"{r.recall.ppl:.3f}" for r in rows))
    table.add_row("  increase (95 % interval)", "", *(_increase(r.recall) for r in rows))
    table.add_row(
        "  recalled answers, nats/token",
        f"{first.recall.base_recall_nll:.3f}",
        *(f"{r.recall.recall_nll:.3f}" for r in rows),
    )
    table.add_row("ACR / causal / KV coverage", "1 / 1 / 1", *(_coverages(r.coverage.to_dict()) for r in rows))
    table.add_row(
        "KV bytes needed at 4096 tokens",
        _bytes(result.full_4k.kv_bytes),
        _bytes(result.coverage_4k.kv_bytes),
        *[""] * (len(names) - 1),
    )
    ratio = first.text.seconds / first.text.base_seconds
    table.add_row("prefill time, patched / full", "1", f"{ratio:.2f}", *[""] * (len(names) - 1))
    out.print(table)
    out.print(f"Reloaded in a new process: logits {'equal bit for bit' if result.reloaded_equal else 'DIFFER'}.")
    out.print("Generated:", style="bold")
    out.print(result.text, markup=False, highlight=False)
    out.print(f"Checkpoint, model card and windows.png: [bold]{result.out}[/]")
    out.print("Seconds: " + ", ".join(f"{k} {v:g}" for k, v in result.seconds.items()), style="dim")


def _increase(quality: Any) -> str:
    low, high = quality.interval
    return f"{quality.increase:+.2%} ({low:+.2%} … {high:+.2%})"


def _coverages(c: dict[str, Any]) -> str:
    return " / ".join(f"{c[key]:.3f}" for key in ("acr", "causal", "kv"))


def _bytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.1f} MiB"


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
