"""Attributes of modules by dotted names, such as ``"layers.0.mlp"``."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import nn


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)
