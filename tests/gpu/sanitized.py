"""A few small cases for compute-sanitizer to watch; `check.py` starts it."""

from __future__ import annotations

import random
import sys

import cases
import torch

from aah_hf.ops import gpu, native

assert gpu.missing(0) is None, native.status()
rng = random.Random(int(sys.argv[1]))
for dtype in cases.DTYPES:
    for head_dim in (64, 128, 80):
        case = cases.draw(rng, dtype, head_dim, max_len=150)
        cases.kernel(case, cases.inputs(case))
torch.cuda.synchronize()
print("sanitized cases ran", flush=True)
