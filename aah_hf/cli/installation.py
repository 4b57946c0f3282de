"""`aah info` and `aah build`: what a model's plan looks like, and what is installed here."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .console import Debug, Json, out, print_json, progress_bars, quiet, user_errors
from .loading import friendly
from .tables import print_description


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
        summary = installation()
        if json_output:
            print_json(summary)
            return
        table = Table(show_header=False, box=None)
        for name, value in (summary | {f"native {k}": v for k, v in summary.pop("native").items()}).items():
            table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
        out.print(table)
        return
    from transformers import AutoConfig

    from ..plan import AAHConfig
    from ..report.plots import plot_windows

    quiet()
    config = friendly(lambda: AutoConfig.from_pretrained(model), model)
    summary = describe(config, model)
    if plot is not None:
        plot_windows(AAHConfig.from_model(config), plot)
    if json_output:
        print_json(summary)
    else:
        print_description(summary)


@user_errors
def build(
    force: Annotated[bool, typer.Option("--force", help="Compile again even if a good library is there.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the compiler commands.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Compile the native operator into this user's cache (needs g++ or clang++)."""
    from ..ops import build as native_build
    from ..ops import native

    with progress_bars() as progress:
        path = native_build.build(
            verbose=verbose, force=force, progress=lambda done, total, label: progress.update("compiling", done, total)
        )
    status = native.status(build_now=True)
    if json_output:
        print_json({"path": str(path), "isa": status.isa, "available": status.available, "reason": status.reason})
    else:
        out.print(f"Built {path} ({status.isa}).", highlight=False, soft_wrap=True)


def installation() -> dict[str, Any]:
    import torch
    import transformers

    from .. import __version__
    from ..families import FAMILIES
    from ..ops.native import status

    native = status()
    return {
        "aah_hf": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "backend": f"native on CPU ({native.isa})" if native.available else "pure PyTorch (banded), no native operator",
        "native": vars(native),
        "families": sorted(FAMILIES),
    }


def describe(model: Any, name: Any) -> dict[str, Any]:
    """A plan as plain JSON: windows, coverage at several lengths, provenance."""
    from ..plan import AAHConfig, coverage_of, text_config

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
