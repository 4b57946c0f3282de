"""Models, budgets and output directories, from what stands on the command line."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import AAHError
from .console import err


def load(model: str, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise AAHError(f"dtype is {dtype!r}; choose float32, bfloat16, float16 or auto.")
    with err.status(f"Loading {model}"):
        if model == "smollm2":
            from ..demo import load_smollm2

            loaded, tokenizer = load_smollm2()
            return loaded if dtype in ("auto", "float32") else loaded.to(getattr(torch, dtype)), tokenizer
        where, extra = model, {}
        if model.endswith(".gguf"):
            where, extra = str(Path(model).parent), {"gguf_file": Path(model).name}

        def load() -> tuple[Any, Any]:
            kind = dtype if dtype == "auto" else getattr(torch, dtype)
            loaded = AutoModelForCausalLM.from_pretrained(where, dtype=kind, **extra)
            return loaded.eval(), AutoTokenizer.from_pretrained(where, **extra)

        return friendly(load, model)


def friendly(load: Callable[[], Any], model: str) -> Any:
    """Loading errors of transformers that a user can mend, without their traceback."""
    try:
        return load()
    except (AAHError, OSError):
        raise
    except (ValueError, KeyError, ImportError) as error:
        raise AAHError(f"{model} cannot be loaded: {error}") from error


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
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


def parse_budget(text: str) -> Any:
    from ..calibration import Budget

    kind, _, value = text.rpartition(":")
    try:
        number = float(value)
    except ValueError:
        raise AAHError(
            f"budget is {text!r}; expected a coverage such as 0.46, causal:0.46, acr:0.3 or kv:0.5."
        ) from None
    return Budget(kind or "causal", number)


_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_kv_budget(text: str, at: int | None) -> Any:
    from ..calibration import Budget

    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = found.group(2).lower() if found else ""
    if found is None or (unit and unit not in _UNITS):
        raise AAHError(f"KV budget is {text!r}; expected a share such as 0.35, or a size such as 512MB or 2GiB.")
    number = float(found.group(1))
    return Budget.kv_bytes(int(number * _UNITS[unit]), at=at) if unit else Budget.kv(number)


def parse_candidates(text: str) -> str | tuple[int, ...]:
    if text in ("fine", "coarse"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise AAHError(f"candidates are {text!r}; expected fine, coarse, or numbers like 128,512,1024.") from None
