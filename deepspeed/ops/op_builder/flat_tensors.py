"""The op ``utils``: flatten tensors into one, and unflatten it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy all elements, in order, into a new 1-D tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of ``flat`` with the shapes of ``tensors``."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
