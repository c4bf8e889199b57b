"""From the `optimizer` section of a config to an optimizer.

Built-in names are case-insensitive; every other name is a class of `torch.optim`. Errors in a section are
found without building anything (`check_optimizer`), so that they can be reported with all other errors.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.config.arguments import TAKES_AUTO, remedy, wrong_optimizer_arguments
from deepspeed.config.problems import MOST_LISTED, DeepSpeedConfigError, cut, nearest, shown
from deepspeed.optim.elementwise import is_elementwise

__all__ = ["available_names", "build_optimizer", "check_optimizer", "is_elementwise"]

OptimizerClass = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """Location of an optimizer's class, as "module:name" under `deepspeed`: only the one that a run uses is
    imported."""

    path: str
    extra_keys: tuple[str, ...] = ()
    """Keys that choose the implementation and are no arguments of the class."""
    torch_name: str | None = None
    """Class of torch.optim that takes over where a key is given that only it knows."""
    host_path: str | None = None
    """What scripts expect in its place where the update is offloaded to host memory; the arithmetic is the same."""

    @property
    def cls(self) -> OptimizerClass:
        return _imported(self.path)


def _imported(path: str) -> OptimizerClass:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"deepspeed.{module}"), name)


_COMPACT_KEYS = ("state_bits", "stochastic_rounding")
_ADAM_KEYS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", *_COMPACT_KEYS)
_FUSED_ADAM, _HOST_ADAM = "ops.adam.fused_adam:FusedAdam", "ops.adam.cpu_adam:DeepSpeedCPUAdam"

BUILT_IN: dict[str, BuiltIn] = {
    "adam": BuiltIn(_FUSED_ADAM, _ADAM_KEYS, host_path=_HOST_ADAM),
    "adamw": BuiltIn(_FUSED_ADAM, _ADAM_KEYS, host_path=_HOST_ADAM),
    "fusedadam": BuiltIn(_FUSED_ADAM, _ADAM_KEYS),
    "lamb": BuiltIn("ops.lamb:FusedLamb"),
    "fusedlamb": BuiltIn("ops.lamb:FusedLamb"),
    "lion": BuiltIn("ops.lion:FusedLion", host_path="ops.lion:DeepSpeedCPULion"),
    "adagrad": BuiltIn("ops.adagrad:Adagrad", torch_name="Adagrad"),
    "sgd": BuiltIn("ops.sgd:SGD", torch_name="SGD"),
    "muon": BuiltIn("zero.muon.muon_optimizer:build_muon"),
    "muadam": BuiltIn("optim.mu_parametrization:mu_adam"),
    "muadamw": BuiltIn("optim.mu_parametrization:mu_adamw"),
    "musgd": BuiltIn("optim.mu_parametrization:mu_sgd"),
    "onebitadam": BuiltIn("optim.onebit:OnebitAdam"),
    "onebitlamb": BuiltIn("optim.onebit:OnebitLamb"),
    "zerooneadam": BuiltIn("optim.onebit:ZeroOneAdam"),
    "diloco": BuiltIn("optim.local_steps:DiLoCo"),
}


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
    settings = _settings(params)
    cls = _resolve(name, settings, on_host)
    try:
        return cls(param_groups, **settings)
    except (TypeError, ValueError) as error:
        raise DeepSpeedConfigError(f"optimizer.params do not fit optimizer.type={name!r}: {error}") from error


def check_optimizer(name: Any, params: Any = None) -> list[str]:
    """Return the mistakes of an `optimizer` section, as messages to its author; empty if there are none."""
    if not isinstance(name, str) or not name:
        return [f"optimizer.type={name!r} must be the name of an optimizer"]
    if params is not None and not isinstance(params, dict):
        return [f"optimizer.params={params!r} must be a mapping of names to values"]
    key = name.lower()
    if key not in BUILT_IN and _torch_class(name) is None:
        return [f"optimizer.type={shown(name)} is unknown{_nearest(name, available_names())}"]
    settings = _settings(params)
    problems = _unknown_keys(name, {**(params or {}), **settings})
    problems += _bad_values(settings) + _contradictions(settings)
    if settings.get("amsgrad") and key in BUILT_IN and not settings.get("torch_adam"):
        problems.append(
            "optimizer.params.amsgrad=true is available with torch's implementation only: set torch_adam=true"
        )
    return problems


def available_names() -> list[str]:
    """Names that `optimizer.type` may have."""
    classes = {attribute for attribute in dir(torch.optim) if _torch_class(attribute) is not None}
    return sorted({*BUILT_IN, *classes})


def _settings(params: dict[str, Any] | None) -> dict[str, Any]:
    """ "auto" means: as if the key were not there."""
    settings = {key: value for key, value in (params or {}).items() if value != "auto" or key in TAKES_AUTO}
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    return settings


def _resolve(name: str, settings: dict[str, Any], on_host: bool) -> OptimizerClass:
    """The class for a valid section; removes keys from `settings` that the class does not take."""
    built_in = BUILT_IN.get(name.lower())
    if built_in is None:
        return _torch_class(name)  # type: ignore[return-value]  # checked before
    if built_in.torch_name is not None and not settings.keys() <= _arguments(built_in.cls).keys():
        return getattr(torch.optim, built_in.torch_name)
    host_path = built_in.host_path if on_host else None
    if built_in.path == _FUSED_ADAM:
        return _adam(name.lower(), settings, on_host=host_path is not None)
    if host_path is not None:
        settings.pop("set_grad_none", None)
        return _imported(host_path)
    return built_in.cls


def _adam(key: str, settings: dict[str, Any], *, on_host: bool) -> OptimizerClass:
    decoupled = bool(settings.pop("adam_w_mode", True)) or key == "adamw"
    fp32_states = settings.pop("fp32_optimizer_states", True)
    compact = {key: settings.pop(key) for key in _COMPACT_KEYS if key in settings}
    if settings.pop("torch_adam", False):
        settings.pop("bias_correction", None)
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    if compact.get("state_bits", 32) == 8 or compact.get("stochastic_rounding"):
        settings.pop("set_grad_none", None)
        settings.update({"state_bits": 32, **compact}, adam_w_mode=decoupled)
        return _imported("ops.adam.compact_adam:CompactAdam")
    if on_host or not fp32_states:
        settings.update(adamw_mode=decoupled, fp32_optimizer_states=fp32_states)
        settings.pop("set_grad_none", None)
        return _imported(_HOST_ADAM)
    settings["adam_w_mode"] = decoupled
    return _imported(_FUSED_ADAM)


def _torch_class(name: str) -> OptimizerClass | None:
    for attribute in (name, *(a for a in dir(torch.optim) if a.lower() == name.lower())):
        cls = getattr(torch.optim, attribute, None)
        if (
            isinstance(cls, type)
            and issubclass(cls, torch.optim.Optimizer)
            and cls is not torch.optim.Optimizer
        ):
            return cls
    return None


def _arguments(cls: OptimizerClass) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(cls).parameters.items())[1:])


def _unknown_keys(name: str, settings: dict[str, Any]) -> list[str]:
    built_in = BUILT_IN.get(name.lower())
    if built_in is None:
        allowed = set(_arguments(_torch_class(name)))  # type: ignore[arg-type]
    else:
        allowed = {*_arguments(built_in.cls), *built_in.extra_keys}
        torch_name = built_in.torch_name or ("AdamW" if settings.get("torch_adam") else None)
        if torch_name is not None:
            allowed |= _arguments(getattr(torch.optim, torch_name)).keys()
    problems = []
    for key in settings:
        if len(problems) == MOST_LISTED:
            return [*problems, "optimizer.params has more unknown keys, which are not listed"]
        if key == "max_grad_norm":
            problems.append(
                "optimizer.params.max_grad_norm is not a parameter: set gradient_clipping at top level"
            )
        elif key not in allowed:
            problems.append(
                f"optimizer.params.{cut(key)} is unknown for optimizer.type={name!r}{_nearest(key, allowed)}; "
                f"allowed: {', '.join(sorted(allowed - {'max_grad_norm'}))}"
            )
    return problems


def _bad_values(settings: dict[str, Any]) -> list[str]:
    return [
        f"optimizer.params.{key}={value!r} must be {text}{remedy(value)}"
        for key, value, text, _ in wrong_optimizer_arguments(settings)
    ]


def _contradictions(settings: dict[str, Any]) -> list[str]:
    """Keys that ask for small states, and keys that choose an implementation without them."""
    small = [key for key in _COMPACT_KEYS if settings.get(key) not in (None, 32, False)]
    others = [f"torch_adam={settings['torch_adam']}"] if settings.get("torch_adam") else []
    if settings.get("fp32_optimizer_states") is False:
        others.append("fp32_optimizer_states=false")
    return [
        f"optimizer.params.{key}={settings[key]!r} cannot be combined with {other}: leave one of them out"
        for key in small
        for other in others
    ]


def _nearest(name: str, choices: Iterable[str]) -> str:
    match = nearest(name, choices)
    return f" (did you mean {match}?)" if match else ""
