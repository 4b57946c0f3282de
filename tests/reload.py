"""Checkpoints loaded again in a process that knows nothing of ours but `import aah_hf`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_CHILD = """
import sys, torch, aah_hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for line in sys.stdin:
    folder = line.strip()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert aah_hf.is_patched(model)
    with torch.no_grad():
        logits = model(load_file(folder + "/ids.safetensors")["ids"]).logits
    save_file({"logits": logits}, folder + "/logits.safetensors")
    print("done", flush=True)
"""


@contextmanager
def other_process() -> Iterator[Reloader]:
    """A process that loads one checkpoint after another."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Reloader(child)
    finally:
        child.kill()
        child.communicate()


class Reloader:
    def __init__(self, child: subprocess.Popen) -> None:
        self.child = child

    def logits(self, folder: Path, ids: torch.Tensor) -> torch.Tensor:
        save_file({"ids": ids.contiguous()}, folder / "ids.safetensors")
        self.child.stdin.write(f"{folder}\n")
        self.child.stdin.flush()
        if self.child.stdout.readline().strip() != "done":
            raise AssertionError(self.child.stderr.read())
        return load_file(folder / "logits.safetensors")["logits"]
