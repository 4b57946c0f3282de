"""`aah patch` and `aah demo`: commands that make a patched checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import AAHError
from .console import Debug, Json, Model, SeqLen, err, out, print_json, progress_bars, quiet, user_errors
from .installation import describe
from .loading import load, parse_budget, parse_candidates, parse_kv_budget, replacing
from .tables import print_demo, print_description


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
    from ..demo import run_demo

    quiet()
    with progress_bars() as progress:
        result = run_demo(
            out_dir,
            seq_len=seq_len,
            budget=budget,
            sequences=sequences,
            progress=progress.update,
            say=lambda text: err.print(f"[bold]•[/] {text}"),
        )
    if json_output:
        print_json(result.to_dict())
    else:
        print_demo(result)
    if not result.reloaded_equal:
        raise AAHError("the reloaded checkpoint gave other logits; please report this.")


@user_errors
def patch(
    model: Model,
    calib: Annotated[Path, typer.Option(help="Text to calibrate on: .txt, or .jsonl with a `text` field.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Directory for the patched checkpoint.")],
    budget: Annotated[
        str | None,
        typer.Option(help="Coverage to stay within: 0.46 (causal), or causal:X, acr:X, kv:X. Default kv:0.5."),
    ] = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(help="KV cache to stay within: a share like 0.35, or bytes of one sequence like 512MB."),
    ] = None,
    kv_at: Annotated[
        int | None, typer.Option(help="Tokens that --kv-budget in bytes is for. Default: --seq-len.", min=1)
    ] = None,
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
    from ..calibration import CalibrationConfig
    from ..patching import patch_model
    from ..plan import AAHConfig
    from ..report.plots import plot_windows

    if out_dir.exists() and not force and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise AAHError(f"{out_dir} exists and is not empty; choose another --out, or --force to replace it.")
    if budget is not None and kv_budget is not None:
        raise AAHError("--budget and --kv-budget were both given; windows are chosen under one budget.")
    limit = parse_kv_budget(kv_budget, kv_at) if kv_budget is not None else parse_budget(budget or "kv:0.5")
    if kv_at is not None and limit.kind != "kv_bytes":
        raise AAHError("--kv-at says for how many tokens --kv-budget's bytes are; give it with a size like 512MB.")
    config = CalibrationConfig(
        budget=limit,
        granularity=granularity or ("kv_head" if limit.of_cache else "head"),
        candidates=parse_candidates(candidates),
        seq_len=seq_len,
        num_sequences=sequences,
        sink_tokens=sink_tokens,
        seed=seed,
    )
    if not calib.exists():
        raise AAHError(f"the calibration file {calib} does not exist.")
    quiet()
    loaded, tokenizer = load(model, dtype)
    with progress_bars() as progress:
        patch_model(loaded, str(calib), calibration=config, tokenizer=tokenizer, progress=progress.update)
    with replacing(out_dir) as folder:
        loaded.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        plot_windows(AAHConfig.from_model(loaded), folder / "windows.png")
    summary = describe(loaded, out_dir)
    if json_output:
        print_json(summary)
    else:
        print_description(summary)
        out.print(f"Saved to [bold]{out_dir}[/]; its README.md is the model card, windows.png the picture.")
