"""A first small kernel on a GPU: whether Triton works there at all.

Triton needs more than its package: a driver that fits, a compiler for its launchers, a folder that it may write to.
Where one of these is missing, PyTorch's operations compute as before, and one warning says why.
"""

# A kernel is Triton, not Python: the types of its arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepspeed.base.logging import logger

_SIZE = 32


@triton.jit
def _trial_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) * 2 + 1)


def passes(device: torch.device) -> bool:
    """Return whether the kernel compiles, runs and gives the right result on ``device``."""
    try:
        x = torch.arange(_SIZE, dtype=torch.float32, device=device)
        out = torch.zeros_like(x)
        with torch.cuda.device_of(x):
            _trial_kernel[(1,)](x, out, SIZE=_SIZE)
        problem = None if torch.equal(out, x * 2 + 1) else "a kernel gave wrong numbers"
    except Exception as error:  # Triton, its compilers and the driver each raise their own
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.warning(
            f"Triton does not work on {device} ({problem}); PyTorch computes instead of GPU kernels"
        )
    return problem is None
