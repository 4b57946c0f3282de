"""`aah info` and `aah build`: what a model's plan looks like, and what is installed here."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..errors import AAHError
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

    if model == "smollm2" or model.endswith(".gguf"):
        raise AAHError(f"{model} is a base model and carries no plan; `aah patch {model} …` makes a model that does.")
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
    from ..ops import build as native_build
    from ..ops import native, recipes, toolchain

    recipe = recipes.default_recipe()
    if cuda or arch is not None or (cuda is None and toolchain.find_nvcc() is not None):
        if cuda is False:
            raise AAHError("--arch names GPUs and --no-cuda leaves them out; give one of the two.")
        recipe = recipes.with_cuda(recipe, arch)
    with progress_bars() as progress:
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
        print_json({"path": str(path), **facts})
        return
    if gpus is not None:
        what = f"GPUs of compute capability {', '.join(gpus)} and newer"
    else:
        what = "no GPU code" + ("" if cuda is False else f": no nvcc was found; to add it, {toolchain.GET_NVCC}")
    out.print(f"Built {path} ({status.isa}; {what}).", highlight=False, soft_wrap=True)


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
        from ..ops import gpu

        missing = gpu.missing(torch.cuda.current_device())
        where = f"used on {torch.cuda.get_device_name()}" if missing is None else f"not used: {missing}"
    return f"{what} ({where}). {UNPROVEN}"


UNPROVEN = "It is verified by emulation and has not yet run on hardware: check yours with tests/gpu/check.py."


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
