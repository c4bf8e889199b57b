"""Copy modules to the meta device, for inspection and tracing without memory for their weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.base.sharded import full_shape


def meta_copy(module: nn.Module, device: str = "meta") -> nn.Module:
    """Return a copy of ``module`` whose parameters and buffers have their full shapes but no storage.

    Tied parameters stay tied, process groups are shared with the original, and gradient hooks are not copied.
    ``device`` is "meta", or any device under a mode that allocates nothing there (fake tensors).
    """
    memo: dict[int, Any] = {
        id(value): value
        for each in module.modules()
        for value in vars(each).values()
        if isinstance(value, ProcessGroup)
    }
    for param in module.parameters():
        empty = torch.empty(full_shape(param), dtype=_meta_dtype(param), device=device)
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad and empty.is_floating_point())
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=_meta_dtype(buffer), device=device)
    return copy.deepcopy(module, memo)


def _meta_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else tensor.dtype
