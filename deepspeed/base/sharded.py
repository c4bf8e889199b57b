"""Read the shape of a parameter that may be sharded: while it is, its own shape is empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LAYOUTS = "_ds_layouts"
"""A module whose parameters were DTensors keeps by name how they lie."""
_SHOWN = 3


def is_zero_param(parameter: Any) -> bool:
    """Tell whether the tensor is a partitioned parameter."""
    return torch.is_tensor(parameter) and hasattr(parameter, "ds_id")


def full_shape(param: Tensor) -> torch.Size:
    return param.ds_shape if is_zero_param(param) else param.shape  # type: ignore[attr-defined]


def full_numel(param: Tensor) -> int:
    return param.ds_numel if is_zero_param(param) else param.numel()  # type: ignore[attr-defined]


def is_dtensor(value: object) -> bool:
    """By name: importing the class takes longer than everything else here."""
    return any(kind.__qualname__ == "DTensor" for kind in type(value).__mro__)


def had_dtensors(model: nn.Module) -> bool:
    """Tell whether parameters of the model are DTensors, or were until an engine took them."""
    return any(map(is_dtensor, model.parameters())) or any(LAYOUTS in vars(each) for each in model.modules())


def listing(names: list[str]) -> str:
    """Name the first of some parameters, for an error."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"parameters {', '.join(names[:_SHOWN])}{more}"
