"""Utilities for nests of tuples, lists and dicts of tensors: move, detach, average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a nest with each leaf of class ``kind`` replaced by what ``change`` returns."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: map_leaves(item, kind, change) for key, item in value.items()}
    return (
        type(value)(map_leaves(item, kind, change) for item in value)
        if type(value) in (tuple, list)
        else value
    )


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a nest with each tensor replaced by what ``change`` returns."""
    return map_leaves(value, Tensor, change)


def without_graph(value: Any) -> Any:
    return map_tensors(value, Tensor.detach)


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def writable(value: Any) -> Any:
    """Alias tensors that require gradients as non-leaves of the same memory, so that layers such as
    ``nn.ReLU(inplace=True)`` may modify them: autograd forbids that for leaves, such as received tensors."""
    return map_tensors(value, lambda tensor: _Alias.apply(tensor) if tensor.requires_grad else tensor)


def to_device(value: Any, device: torch.device) -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().to(device))


def mean_of(values: list[Any]) -> Any:
    """Average nests of equal structure tensor by tensor; other values are the first's. ValueError: shapes differ."""
    first = values[0]
    if isinstance(first, Tensor):
        if any(value.shape != first.shape for value in values):
            shapes = ", ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(f"outputs of the shapes {shapes} cannot be averaged: set reduce_output=None")
        wide = first if first.is_floating_point() or first.is_complex() else first.float()
        return torch.stack([value.to(wide.dtype) for value in values]).mean(dim=0)
    if isinstance(first, dict):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(mean_of([value[i] for value in values]) for i in range(len(first)))
    return first
