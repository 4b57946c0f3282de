"""`aah`: the command line. Every command is a thin layer over the Python API."""

from __future__ import annotations

import typer

from .benchmarks import bench_generate_command, bench_ops_command, bench_prefill_command
from .evaluation import evaluate_command
from .installation import build, info
from .patching import demo, patch
from .study import study_command

app = typer.Typer(
    name="aah",
    help="Asymmetric attention heads for Hugging Face models: calibrate, patch, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(patch)
app.command()(info)
app.command("eval")(evaluate_command)
app.command()(build)
app.command("study")(study_command)

bench = typer.Typer(help="Benchmarks: interleaved repeats in one process, medians as ratios.", no_args_is_help=True)
bench.command("ops")(bench_ops_command)
bench.command("prefill")(bench_prefill_command)
bench.command("generate")(bench_generate_command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `aah` script."""
    app()
