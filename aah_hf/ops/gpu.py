"""Whether the native operator runs on a GPU, and if not, why."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import OperatorError
from . import native


@torch.compiler.assume_constant_result
def missing(index: int) -> str | None:
    """Why the native operator cannot run on a GPU of torch's; None where it can. Compiles nothing.

    Raises:
        OperatorError: `AAH_HF_NATIVE=require` and it cannot.
    """
    found = native.status()
    why: str | None
    if not found.available:
        reason = "not built yet; `aah build` does it" if found.reason == native.NOT_BUILT else found.reason
        why = f"the native operator is not there: {reason}"
    elif torch.version.hip:
        why = "the native operator has no code for AMD GPUs"
    else:
        why = refusal(found.cuda, _capability(index))
    if why is not None and found.mode == "require":
        raise OperatorError(f"AAH_HF_NATIVE=require, but {why}")
    return why


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def refusal(cuda: dict[str, Any] | None, capability: tuple[int, int]) -> str | None:
    if cuda is None:
        return "the native operator was built without code for GPUs; `aah build` adds it where it finds nvcc"
    if cuda["driver"] == 0:
        return "there is no NVIDIA driver, or it does not answer"
    if cuda["driver"] // 1000 < cuda["runtime"] // 1000:  # of one major version every driver serves every runtime
        have, want = cuda["driver"] // 1000, cuda["runtime"] // 1000
        return f"the driver is for CUDA {have} and the native operator was built with CUDA {want}; update the driver"
    targets = [int(word) for word in cuda["targets"].split(",")]
    here = 10 * capability[0] + capability[1]
    if here < targets[0]:
        return f"this GPU has compute capability {here} and the native operator was built for {targets[0]} and newer"
    has_code = any(target // 10 == capability[0] and target <= here for target in targets)
    if not has_code and cuda["driver"] < cuda["runtime"]:
        return (
            f"the native operator has no machine code for compute capability {here}, and this driver cannot compile "
            f"its PTX; build it with `aah build --arch {here}`, or update the driver"
        )
    return None
