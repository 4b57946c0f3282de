"""`aah study`: the paper's experiment in small."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import Debug, Json, err, out, print_json, progress_bars, quiet, user_errors


@user_errors
def study_command(
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the study; a stopped one goes on.")] = Path(
        "aah-study"
    ),
    preset: Annotated[
        str,
        typer.Option(help="small (20 minutes on two cores), or paper (1B parameters at 4096 tokens; several GPUs)."),
    ] = "small",
    regime: Annotated[
        list[str] | None,
        typer.Option(help="Regime or control, or name:setting=value,…; may be repeated. Default: the preset's."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs per regime, seeds 0, 1, ….", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of a run.", min=1)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.", min=8)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step, over all devices.", min=1)] = None,
    family: Annotated[str | None, typer.Option(help="llama or qwen3.")] = None,
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="0: as many as heads.", min=0)] = None,
    width: Annotated[int | None, typer.Option(help="Hidden size.", min=2)] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP.", min=1)] = None,
    learning_rate: Annotated[float | None, typer.Option()] = None,
    weight_decay: Annotated[float | None, typer.Option()] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of linear warm-up of the learning rate.", min=0)] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches of a step on each device.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 (autocast).")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between points of the curve.", min=1)] = None,
    eval_sequences: Annotated[int | None, typer.Option(help="Validation sequences, at most.", min=1)] = None,
    control_interval: Annotated[int | None, typer.Option(help="Steps between decisions.", min=1)] = None,
    control_warmup: Annotated[int | None, typer.Option(help="First steps, with full attention.", min=0)] = None,
    data: Annotated[
        str | None, typer.Option(help="A .txt or .jsonl file, or wikitext-2. Default: Python's help topics.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub name. Default: a BPE trained on the text.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of the trained BPE; 257 is plain bytes.", min=257)] = None,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep every trained checkpoint.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """The paper's experiment: one decoder from scratch under every regime and control, with equal seeds and data order.

    Prints the paper's table with causal coverage, mean and spread over seeds, and what differs beyond the spread; draws
    loss curves and window heatmaps into --out. On several devices start it with `accelerate launch -m aah_hf.cli study`.
    """
    from rich.table import Table

    from ..study.config import preset as preset_of
    from ..study.results import COLUMNS, findings, table
    from ..study.run import process_state, run_study

    config = preset_of(
        preset,
        regimes=tuple(regime) if regime else None,
        seeds=seeds,
        steps=steps,
        seq_len=seq_len,
        batch_size=batch_size,
        family=family,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        intermediate=intermediate,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        warmup=warmup,
        accumulate=accumulate,
        dtype=dtype,
        eval_every=eval_every,
        eval_sequences=eval_sequences,
        control_interval=control_interval,
        control_warmup=control_warmup,
        data=data,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
    )
    quiet()
    if not process_state().is_main_process:
        run_study(config, out_dir, keep_models=keep_models)
        return
    with progress_bars() as progress:
        result = run_study(config, out_dir, keep_models=keep_models, progress=progress.update)
    if json_output:
        print_json(
            {
                "config": config.to_dict(),
                "parameters": result.parameters,
                "train_tokens": result.train_tokens,
                "validation_tokens": result.validation_tokens,
                "rows": {
                    name: {key: [figure.mean, figure.spread] for key, figure in figures.items()}
                    for name, figures in table(result.results).items()
                },
                "finding": findings(result.results),
                "out": str(out_dir),
            }
        )
        return
    title = (
        f"{config.family}, {result.parameters / 1e6:.1f}M parameters, {config.seq_len} tokens, {config.steps} steps of "
        f"{config.batch_size} sequences; mean ± standard deviation over {config.seeds} seed(s)"
    )
    shown = Table("regime", *(heading for _, heading, _ in COLUMNS), title=title)
    for name, figures in table(result.results).items():
        shown.add_row(name, *(figures[key].text(digits) for key, _, digits in COLUMNS))
    out.print(shown)
    out.print(findings(result.results), highlight=False, markup=False)
    err.print(f"table.md, curves.png, windows.png and the decisions of every run are in [bold]{out_dir}[/].")
