"""Adam and AdamW."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
    from deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

_MODULE_OF = {"DeepSpeedCPUAdam": "cpu_adam", "FusedAdam": "fused_adam"}
"""Imported on first access: a run uses one of them."""


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value
