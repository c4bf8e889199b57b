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
from functools import cache

import torch
from torch import Tensor

OLDEST = 8
"""The first compute capability (of NVIDIA's GPUs) for whose kernels this package is compiled in its tests."""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _new_enough(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= OLDEST


def usable(*tensors: Tensor | None) -> bool:
    """Whether the kernels of this package take these tensors: all on one GPU that Triton can compile for. ``None``
    stands for a tensor that is left out."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not given or not given[0].is_cuda or not _has_triton():
        return False
    device = given[0].device
    return all(tensor.device == device for tensor in given) and _new_enough(device)
