"""Peak memory of one call, from the kernel's own high-water mark (Linux)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(call: Callable[[], Any], device: str = "cpu") -> int | None:
    """Bytes by which `call` raises the process's memory at its highest, its result included; None where unknown.

    On the CPU this is the resident set: whatever a kernel takes counts, whoever allocates it. The call runs once
    before, so that what stays allocated for later calls (threads' scratch) does not count again.
    """
    call()
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    peaks = []
    for _ in range(3):  # the system may take pages back, or bring some in, at any time: the middle one counts
        try:
            _RESET.write_text("5")  # sets the high-water mark back to what is resident now
        except OSError:
            return None
        before = _kib("VmRSS")
        result = call()
        peaks.append(_kib("VmHWM") - before)
        del result
    return sorted(peaks)[1] * 1024


def _kib(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])
