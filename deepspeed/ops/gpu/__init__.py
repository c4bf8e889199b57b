"""Triton kernels for tensors on a GPU, each next to a plain reference that works without one.

A module of this package holds the kernels of one subject and the functions that launch them. Such a function takes the
tensors of the plain operation and returns its results; it checks shapes, not devices, so that tests can call it with
CPU tensors where Triton interprets kernels (`tests/ops/gpu/triton_kit.py`). Its caller chooses between the host's
kernel and PyTorch: it first asks `usable`, and only then imports the module, which imports Triton. Nothing here is
imported with the package, or by a process without a GPU.

Rules for all kernels: arithmetic is in fp32 whatever the storage dtype, indices are int64 where a tensor may have more
than 2^31 elements, and results that must match the host's kernel bit for bit are compiled without fused multiply-adds,
as the host's kernels are.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

MIN_CAPABILITY = 8
"""Lowest compute capability (of NVIDIA's GPUs) that the tests compile these kernels for."""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None and os.environ.get("DS_GPU_KERNELS", "1") != "0"


_RUNS: dict[torch.device, bool] = {}


def _runs_on(device: torch.device) -> bool:
    if device not in _RUNS:
        if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] < MIN_CAPABILITY:
            _RUNS[device] = False
        elif torch.cuda.is_current_stream_capturing():  # the trial would invalidate the capture
            return False
        else:
            from deepspeed.ops.gpu import trial  # imports Triton

            _RUNS[device] = trial.passes(device)
    return _RUNS[device]


def offered() -> bool:
    """Return whether this process' GPU should run these kernels, without running a trial."""
    if not _has_triton() or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= MIN_CAPABILITY


def usable(*tensors: Tensor | None) -> bool:
    """Return whether the kernels of this package take these tensors: all on one GPU that has passed the trial kernel.
    ``None`` stands for an omitted tensor. False while torch compiles a graph, as its compiler generates the kernels
    there."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not given or not given[0].is_cuda or not _has_triton() or torch.compiler.is_compiling():
        return False
    device = given[0].device
    return all(tensor.device == device for tensor in given) and _runs_on(device)
