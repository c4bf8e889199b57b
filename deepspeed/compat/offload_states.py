"""Documented place of ``get_state_devices`` and of the helpers that move an optimizer's state."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.compat.helpers.optimizer_states import (
    offload_adam_states,
    offload_optimizer_states,
    reload_adam_states,
    reload_optimizer_states,
)
from deepspeed.config.sections.offload import OffloadStateTypeEnum

__all__ = [
    "get_state_devices",
    "offload_adam_states",
    "offload_optimizer_states",
    "reload_adam_states",
    "reload_optimizer_states",
]


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices that hold this kind of state of an engine; none, if it has no such state now."""
    return model.optimizer.mover.devices(OffloadStateTypeEnum(state))
