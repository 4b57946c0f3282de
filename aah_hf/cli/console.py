"""What every command shares: where it prints, progress bars, errors, and common options."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..errors import AAHError

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


class Bars:
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
def progress_bars() -> Iterator[Bars]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err) as bars:
        yield Bars(bars)


def quiet() -> None:
    """transformers' own bars and notes would break ours and JSON on stdout; its warnings stay."""
    from transformers.utils import logging

    logging.set_verbosity_warning()
    logging.disable_progress_bar()


def print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
