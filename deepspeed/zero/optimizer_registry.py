"""From the `optimizer` section of a config to an optimizer.

Built-in names are case-insensitive; every other name is a class of `torch.optim`. What a section may say is checked
in `config/optimizers.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.config.optimizers import (
    BUILT_IN,
    COMPACT_KEYS,
    OF_TORCH,
    check_optimizer,
    settings_of,
    torch_name,
)
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.optim.elementwise import is_elementwise

__all__ = ["build_optimizer", "is_elementwise"]

OptimizerClass = Callable[..., torch.optim.Optimizer]


def imported(path: str) -> OptimizerClass:
    """Import the class at a ``BuiltIn.path``."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"deepspeed.{module}"), name)


_FUSED_ADAM, _HOST_ADAM = BUILT_IN["adam"].path, str(BUILT_IN["adam"].host_path)


def build_optimizer(
    name: str, params: dict[str, Any] | None, param_groups: Any, *, on_host: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that `{"type": name, "params": params}` asks for, on `param_groups` (as for torch.optim).
    `on_host`: its update is offloaded to host memory.

    Raises:
        DeepSpeedConfigError: unknown or unavailable name, unknown parameter, or a value out of range; all
            problems at once.
    """
    problems = check_optimizer(name, params)
    if problems:
        raise DeepSpeedConfigError("; ".join(problems))
    settings = settings_of(params)
    cls = _resolve(name, settings, on_host)
    try:
        return cls(param_groups, **settings)
    except (TypeError, ValueError) as error:
        raise DeepSpeedConfigError(f"optimizer.params do not fit optimizer.type={name!r}: {error}") from error


def _resolve(name: str, settings: dict[str, Any], on_host: bool) -> OptimizerClass:
    """The class for a valid section; removes keys from `settings` that the class does not take."""
    key = name.lower()
    built_in = BUILT_IN.get(key)
    if built_in is None:
        return getattr(torch.optim, torch_name(name) or name)
    if key in OF_TORCH and not settings.keys() <= built_in.arguments:
        return getattr(torch.optim, OF_TORCH[key])
    host_path = built_in.host_path if on_host else None
    if built_in.path == _FUSED_ADAM:
        return _adam(key, settings, on_host=host_path is not None)
    if host_path is not None:
        settings.pop("set_grad_none", None)
        return imported(host_path)
    return imported(built_in.path)


def _adam(key: str, settings: dict[str, Any], *, on_host: bool) -> OptimizerClass:
    decoupled = bool(settings.pop("adam_w_mode", True)) or key == "adamw"
    fp32_states = settings.pop("fp32_optimizer_states", True)
    compact = {key: settings.pop(key) for key in COMPACT_KEYS if key in settings}
    if settings.pop("torch_adam", False):
        settings.pop("bias_correction", None)
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    if compact.get("state_bits", 32) == 8 or compact.get("stochastic_rounding"):
        settings.pop("set_grad_none", None)
        settings.update({"state_bits": 32, **compact}, adam_w_mode=decoupled)
        return imported("ops.adam.compact_adam:CompactAdam")
    if on_host or not fp32_states:
        settings.update(adamw_mode=decoupled, fp32_optimizer_states=fp32_states)
        settings.pop("set_grad_none", None)
        return imported(_HOST_ADAM)
    settings["adam_w_mode"] = decoupled
    return imported(_FUSED_ADAM)
