"""Trial kernel: find out whether Triton works on a GPU.

Triton needs more than its package: a matching driver, a compiler for its launchers, a writable cache folder. If one of
these is missing, PyTorch's operations are used instead, and one warning says why.
"""

# A kernel is Triton, not Python: its argument types mean nothing to a type checker.
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
    """Return whether the trial kernel compiles, runs and gives the right result on ``device``."""
    try:
        x = torch.arange(_SIZE, dtype=torch.float32, device=device)
        out = torch.zeros_like(x)
        with torch.cuda.device_of(x):
            _trial_kernel[(1,)](x, out, SIZE=_SIZE)
        problem = None if torch.equal(out, x * 2 + 1) else "a kernel returned wrong results"
    except Exception as error:  # Triton, its compilers and the driver raise various types
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.warning(
            f"Triton does not work on {device} ({problem}); falling back from GPU kernels to PyTorch"
        )
    return problem is None
