"""Read the full shape of a parameter that may be sharded, whose own shape is then [0]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.tables import first_of

LAYOUTS = "_ds_layouts"
"""Module attribute: the layouts, by name, of parameters that were DTensors."""


def is_zero_param(parameter: Any) -> bool:
    """Return whether the tensor is a partitioned parameter."""
    return torch.is_tensor(parameter) and hasattr(parameter, "ds_id")


def full_shape(param: Tensor) -> torch.Size:
    return param.ds_shape if is_zero_param(param) else param.shape  # type: ignore[attr-defined]


def full_numel(param: Tensor) -> int:
    return param.ds_numel if is_zero_param(param) else param.numel()  # type: ignore[attr-defined]


def is_dtensor(value: object) -> bool:
    """Return whether ``value`` is a DTensor. Checked by name, because importing the class is slow."""
    return any(kind.__qualname__ == "DTensor" for kind in type(value).__mro__)


def had_dtensors(model: nn.Module) -> bool:
    """Return whether parameters of the model are DTensors, or were until an engine took them."""
    return any(map(is_dtensor, model.parameters())) or any(LAYOUTS in vars(each) for each in model.modules())


def list_params(names: list[str]) -> str:
    """List the first names of parameters, for an error message."""
    return f"parameters {first_of(names, 3)}"
