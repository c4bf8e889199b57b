"""Documented path of ``get_state_devices`` and of helpers that move an optimizer's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.config.sections.offload import OffloadStateTypeEnum

_MOMENTS = {"exp_avg", "exp_avg_sq"}


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices that hold this kind of state of an engine; empty if it has no such state now."""
    return model.optimizer.mover.devices(OffloadStateTypeEnum(state))


def offload_optimizer_states(
    optimizer: Any, device: torch.device | str, pin_memory: bool = False, non_blocking: bool = False
) -> None:
    """Move the tensors of an optimizer's state to ``device``; to pinned memory if ``pin_memory``, ``device`` is the
    host and there is a GPU."""
    _move(optimizer, device, pin_memory, non_blocking)


def reload_optimizer_states(optimizer: Any, device: torch.device | str, non_blocking: bool = False) -> None:
    _move(optimizer, device, non_blocking=non_blocking)


def offload_adam_states(
    optimizer: Any, device: torch.device | str, pin_memory: bool = False, non_blocking: bool = False
) -> None:
    """Move only Adam's moments, as `offload_optimizer_states`."""
    _move(optimizer, device, pin_memory, non_blocking, keys=_MOMENTS)


def reload_adam_states(optimizer: Any, device: torch.device | str, non_blocking: bool = False) -> None:
    _move(optimizer, device, non_blocking=non_blocking, keys=_MOMENTS)


def _move(
    optimizer: Any,
    device: torch.device | str,
    pin_memory: bool = False,
    non_blocking: bool = False,
    keys: set[str] | None = None,
) -> None:
    """Move the tensors named by ``keys`` (None: all) in place, so that every reference to them sees the move."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and (keys is None or key in keys):
                value.data = _moved(value.data, torch.device(device), pin_memory, non_blocking)


def _moved(value: Tensor, device: torch.device, pin: bool, non_blocking: bool) -> Tensor:
    if pin and device.type == "cpu" and value.device.type != "cpu" and torch.cuda.is_available():
        return torch.empty_like(value, device=device, pin_memory=True).copy_(value, non_blocking=non_blocking)
    return value.to(device, non_blocking=non_blocking)
