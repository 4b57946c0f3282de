"""`aah bench`: the operator against its peers, a patched model against its base."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .console import Debug, Json, Model, print_json, progress_bars, quiet, user_errors
from .installation import installation
from .loading import load
from .tables import print_bench, print_generation, print_prefill

Control = Annotated[
    str | None, typer.Option("--windows", help="uniform:W or shuffled:SEED instead of the model's windows.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or auto.")]


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
    from ..bench import PEERS, bench_ops, call_overhead

    with progress_bars() as progress:
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
        print_json({"rows": [row.to_dict() for row in rows], "call_overhead_us": overhead, **installation()})
        return
    print_bench(rows, PEERS, overhead)


@user_errors
def bench_prefill_command(
    model: Model,
    seq_len: Annotated[
        list[int] | None, typer.Option(help="Lengths; may be repeated. Default 2048, 4096, 8192.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    windows: Control = None,
    dtype: Dtype = "auto",
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """A patched model's prefill against full attention, and against what the share of attention allows."""
    from ..bench import bench_prefill

    loaded = _patched(model, dtype, windows)
    with progress_bars() as progress:
        rows = list(
            bench_prefill(loaded, seq_lens=seq_len or (2048, 4096, 8192), repeats=repeats, progress=progress.update)
        )
    if json_output:
        print_json({"model": model, "rows": [row.to_dict() for row in rows], **installation()})
        return
    print_prefill(model, rows)


@user_errors
def bench_generate_command(
    model: Model,
    batch: Annotated[list[int] | None, typer.Option(help="Rows; may be repeated. Default 1, 4.")] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Prompt tokens; may be repeated. Default 1024, 2048, 4096, 8192.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded one at a time.", min=1)] = 32,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    windows: Control = None,
    dtype: Dtype = "auto",
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Prefill and decode tokens/s and cache bytes, against full attention with a DynamicCache on the same weights."""
    from ..bench import bench_generate

    loaded = _patched(model, dtype, windows)
    with progress_bars() as progress:
        rows = list(
            bench_generate(
                loaded,
                batches=batch or (1, 4),
                contexts=context or (1024, 2048, 4096, 8192),
                new_tokens=new_tokens,
                repeats=repeats,
                progress=progress.update,
            )
        )
    if json_output:
        print_json({"model": model, "rows": [row.to_dict() for row in rows], **installation()})
        return
    print_generation(model, rows)


def _patched(model: str, dtype: str, windows: str | None) -> Any:
    from ..evaluation import control_plan
    from ..patching import patch_model

    quiet()
    loaded, _ = load(model, dtype)
    return loaded if windows is None else patch_model(loaded, config=control_plan(loaded, windows))
