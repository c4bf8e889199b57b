"""Triton kernels for tensors on a GPU, each beside a plain reference that exists without it.

A module of this package holds the kernels of one subject and the functions that launch them. Such a function takes the
tensors of the plain operation and returns its results; it looks at shapes, not at devices, so that a test can call it
with CPU tensors where Triton interprets kernels (`tests/ops/gpu/triton_kit.py`). Who calls it is the place that chooses
between the host's kernel and PyTorch: it asks `usable` first, and only then imports the module, which imports Triton.
Nothing here is imported with the package, nor by a process that has no GPU.

Rules that all kernels keep: numbers are computed in fp32 whatever they are stored in, an index is computed in int64
where a tensor may have more than 2^31 elements, and what has to be equal to the host's kernel bit for bit is compiled
without fused multiply-adds, as the host's kernels are.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

MIN_CAPABILITY = 8
"""The first compute capability (of NVIDIA's GPUs) for whose kernels this package is compiled in its tests."""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None and os.environ.get("DS_GPU_KERNELS", "1") != "0"


_RUNS: dict[torch.device, bool] = {}


def _runs_on(device: torch.device) -> bool:
    if device not in _RUNS:
        if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] < MIN_CAPABILITY:
            _RUNS[device] = False
        elif torch.cuda.is_current_stream_capturing():  # what the trial does would end it
            return False
        else:
            from deepspeed.ops.gpu import trial  # imports Triton

            _RUNS[device] = trial.passes(device)
    return _RUNS[device]


def offered() -> bool:
    """Return whether these kernels are for the GPU of this process, as far as that is known before one of them has
    run."""
    if not _has_triton() or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= MIN_CAPABILITY


def usable(*tensors: Tensor | None) -> bool:
    """Return whether the kernels of this package take these tensors: all on one GPU on which a first small kernel has
    given the right result. ``None`` stands for a tensor that is left out. False inside a graph that torch compiles: its
    own compiler makes the kernels there."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not given or not given[0].is_cuda or not _has_triton() or torch.compiler.is_compiling():
        return False
    device = given[0].device
    return all(tensor.device == device for tensor in given) and _runs_on(device)
