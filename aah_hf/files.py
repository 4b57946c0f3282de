"""Files that a reader finds whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write to in the folder of `path`, which takes its place at the end and vanishes on an error.

    What stood at `path` stays until then, and whoever has it open or mapped keeps it.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)  # mkstemp's files are private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike, text: str) -> Path:
    """Write a small text file."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return Path(path)
