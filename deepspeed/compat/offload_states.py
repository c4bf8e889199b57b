"""Documented path of ``get_state_devices`` and of helpers that move an optimizer's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.config.sections.offload import OffloadStateTypeEnum

_MOMENTS = ("exp_avg", "exp_avg_sq")


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices that hold this kind of state of an engine; empty if it has no such state now."""
    return model.optimizer.mover.devices(OffloadStateTypeEnum(state))


def offload_adam_states(
    optimizer: Any, device: torch.device | str, pin_memory: bool = False, non_blocking: bool = False
) -> None:
    """Move Adam's moments to ``device``; to pinned memory if ``pin_memory``, ``device`` is the host and there is a
    GPU."""
    _move(optimizer, _MOMENTS, device, pin_memory, non_blocking)


def reload_adam_states(optimizer: Any, device: torch.device | str, non_blocking: bool = False) -> None:
    _move(optimizer, _MOMENTS, device, False, non_blocking)


def offload_optimizer_states(
    optimizer: Any, device: torch.device | str, pin_memory: bool = False, non_blocking: bool = False
) -> None:
    """Move every per-element tensor of an optimizer's state to ``device``, as ``offload_adam_states`` does."""
    _move(optimizer, None, device, pin_memory, non_blocking)


def reload_optimizer_states(optimizer: Any, device: torch.device | str, non_blocking: bool = False) -> None:
    _move(optimizer, None, device, False, non_blocking)


def _move(
    optimizer: Any, keys: tuple[str, ...] | None, device: torch.device | str, pin: bool, non_blocking: bool
) -> None:
    """Move state tensors in place, so that every reference to them sees the move."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            wanted = key in keys if keys is not None else _per_element(param, value)
            if wanted and isinstance(value, Tensor):
                value.data = _moved(value.data, torch.device(device), pin, non_blocking)


def _per_element(param: Any, value: Any) -> bool:
    return (
        isinstance(param, Tensor)
        and isinstance(value, Tensor)
        and value.shape == param.shape
        and value.dim() > 0
    )


def _moved(value: Tensor, device: torch.device, pin: bool, non_blocking: bool) -> Tensor:
    if pin and device.type == "cpu" and value.device.type != "cpu" and torch.cuda.is_available():
        return torch.empty_like(value, device=device, pin_memory=True).copy_(value, non_blocking=non_blocking)
    return value.to(device, non_blocking=non_blocking)
