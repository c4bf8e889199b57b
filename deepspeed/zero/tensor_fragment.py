"""Read and write the fp32 weight, gradient and optimizer state of a parameter, wherever they rest.

An engine that keeps such state separate from the parameter sets an access object on it (attribute
``_ds_state_access``), which the functions here use. A parameter without it keeps its own state.

*Full* functions are collective: every rank of the parameter's data-parallel group calls them, for the
same parameters in the same order. Gradients exist from ``backward`` to ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

ACCESS = "_ds_state_access"


def _access(param: Tensor) -> Any:
    """Return the parameter's ``deepspeed.zero.states.access.StateAccess``; None if there is none."""
    return getattr(param, ACCESS, None)


def is_kept_by_engine(param: Tensor) -> bool:
    """Return whether an engine keeps state for the parameter."""
    return _access(param) is not None


def _required(param: Tensor) -> Any:
    access = _access(param)
    if access is None:
        raise ValueError(
            f"No engine keeps state for the parameter of shape {tuple(param.shape)}: it is frozen, or "
            "trained without ZeRO and master weights: write to the parameter itself."
        )
    return access


def _check_order(value: Any, optim_state_key: Any) -> None:
    if isinstance(value, str) or not isinstance(optim_state_key, str):
        raise ValueError(
            f"The arguments are (param, value, optim_state_key), a tensor before the name of the state, not "
            f"(param, {type(value).__name__}, {type(optim_state_key).__name__})."
        )


def _check_shape(param: Tensor, value: Tensor) -> None:
    expected = tuple(getattr(param, "ds_shape", param.shape))
    if tuple(value.shape) != expected:
        raise ValueError(f"The parameter has shape {expected}, but the given value has {tuple(value.shape)}.")


# --- The whole tensor -----------------------------------------------------------------------------


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the whole fp32 master weight; None if no engine keeps one. Collective."""
    access = _access(param)
    return None if access is None else access.full_master(param)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write the whole master weight and, from it, the weight that the model computes with. Collective."""
    access = _required(param)
    _check_shape(param, value)
    access.set_full_master(param, value)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state tensor such as ``"exp_avg"``; None if no engine keeps one. Collective."""
    access = _access(param)
    return None if access is None else access.full_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write a whole optimizer state tensor. Collective."""
    _check_order(value, optim_state_key)
    access = _required(param)
    _check_shape(param, value)
    access.set_full_state(param, optim_state_key, value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the whole gradient in fp32, reduced over the ranks; ``param.grad`` if no engine keeps it; None if there
    is none now. Inside ``engine.no_sync()`` it is this rank's local sum. Collective."""
    access = _access(param)
    return param.grad if access is None else access.full_gradient(param)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Write the whole gradient. Collective."""
    access = _access(param)
    _check_shape(param, value)
    if access is None:
        if param.grad is None:
            raise ValueError(
                "The parameter has no gradient to write; gradients exist only between backward() and step()."
            )
        with torch.no_grad():
            param.grad.copy_(value)
    else:
        access.set_full_gradient(param, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor | None]
) -> None:
    """Replace the gradients of many parameters: ``update_func(gradient, param)`` gets the whole gradient and returns
    the new one, or changes it in place and returns None. Parameters without a gradient are skipped. Collective."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            with torch.no_grad():
                updated = update_func(gradient, param)
            safe_set_full_grad(param, gradient if updated is None else updated)


# --- This rank's part -----------------------------------------------------------------------------


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """Return this rank's part of the master weight, 1-D; None if no engine keeps one."""
    access = _access(param)
    return None if access is None else access.local_master(param)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write this rank's part of the master weight; the model computes with it after the next ``step``."""
    _required(param).set_local_master(param, value)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state tensor, 1-D; None if no engine keeps one."""
    access = _access(param)
    return None if access is None else access.local_state(param, optim_state_key)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's part of an optimizer state tensor."""
    _check_order(value, optim_state_key)
    _required(param).set_local_state(param, optim_state_key, value)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Return this rank's part of the reduced gradient, 1-D; None if there is none now."""
    access = _access(param)
    return None if access is None else access.local_gradient(param)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Write this rank's part of the reduced gradient."""
    _required(param).set_local_gradient(param, value)


# --- The same as functions to bind to a parameter -------------------------------------------------


def get_full_hp_param(self: nn.Parameter, optim_state_key: str | None = None) -> Tensor | None:
    """Return the whole master weight, or the optimizer state with this key if given. Collective."""
    if optim_state_key is None:
        return safe_get_full_fp32_param(self)
    return safe_get_full_optimizer_state(self, optim_state_key)


def set_full_hp_param(self: nn.Parameter, value: Tensor, optim_state_key: str | None = None) -> None:
    if optim_state_key is None:
        safe_set_full_fp32_param(self, value)
    else:
        safe_set_full_optimizer_state(self, value, optim_state_key)


def get_full_hp_grad(self: nn.Parameter) -> Tensor | None:
    return safe_get_full_grad(self)


def set_full_hp_grad(self: nn.Parameter, value: Tensor) -> None:
    safe_set_full_grad(self, value)
