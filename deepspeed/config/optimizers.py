"""Checking an `optimizer` section: names of optimizers, and which arguments each takes.

Built-in names are case-insensitive; every other name is a class of `torch.optim`. Nothing is built or imported, so that
errors here can be reported with all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.config import torch_classes
from deepspeed.config.arguments import TAKES_AUTO, remedy, wrong_optimizer_arguments
from deepspeed.config.problems import MOST_LISTED, cut, nearest, shown
from deepspeed.config.torch_classes import arguments_of, classes_of

COMPACT_KEYS = ("state_bits", "stochastic_rounding")
"""Arguments that ask for small states."""

_ADAM = frozenset({"lr", "bias_correction", "betas", "eps", "weight_decay"})
_FUSED_ADAM = _ADAM | {
    "adam_w_mode",
    "amsgrad",
    "set_grad_none",
    "torch_adam",
    "fp32_optimizer_states",
    *COMPACT_KEYS,
}
_SGD = frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov"})
_LAMB = _ADAM | {"eps_inside_sqrt", "max_grad_norm", "max_coeff", "min_coeff", "amsgrad"}
_SIGNS = _ADAM | {
    "deepspeed",
    "eps_inside_sqrt",
    "max_grad_norm",
    "amsgrad",
    "cuda_aware",
    "comm_backend_name",
}

ARGUMENTS: dict[str, frozenset[str]] = {
    "adam": _FUSED_ADAM,
    "adamw": _FUSED_ADAM,
    "fusedadam": _FUSED_ADAM,
    "lamb": _LAMB,
    "fusedlamb": _LAMB,
    "lion": frozenset({"lr", "betas", "weight_decay", "set_grad_none"}),
    "adagrad": frozenset({"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"}),
    "sgd": _SGD,
    "muon": frozenset(
        {"lr", "momentum", "weight_decay", "muon_lr", "adam_lr", "betas", "eps", "ns_method", "per_head_muon"}
    ),
    "muadam": _ADAM | {"adam_w_mode"},
    "muadamw": _ADAM,
    "musgd": _SGD,
    "onebitadam": _SIGNS | {"freeze_step", "variance_interval"},
    "onebitlamb": _SIGNS
    | {"freeze_step", "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold"},
    "zerooneadam": _SIGNS
    | {"var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"},
    "diloco": _ADAM | {"sync_every", "outer_lr", "outer_momentum", "warmup_steps", "codec"},
}
"""Built-in optimizer -> keys of `optimizer.params`: arguments of its class, and those that choose among classes."""

OF_TORCH = {"adagrad": "Adagrad", "sgd": "SGD"}
"""Built-in optimizer -> class of torch.optim that takes over where a key is given that only it knows."""


def check_optimizer(name: Any, params: Any = None) -> list[str]:
    """List what is wrong with an `optimizer` section, as messages to its author."""
    if not isinstance(name, str) or not name:
        return [f"optimizer.type={name!r} must be the name of an optimizer"]
    if params is not None and not isinstance(params, dict):
        return [f"optimizer.params={params!r} must be a mapping of names to values"]
    key = name.lower()
    if key not in ARGUMENTS and torch_name(name) is None:
        names = sorted({*ARGUMENTS, *classes_of(torch_classes.OPTIMIZERS)})
        return [f"optimizer.type={shown(name)} is unknown{_nearest(name, names)}"]
    settings = settings_of(params)
    problems = _unknown_keys(name, {**(params or {}), **settings})
    problems += _bad_values(settings) + _contradictions(settings)
    if settings.get("amsgrad") and key in ARGUMENTS and not settings.get("torch_adam"):
        problems.append(
            "optimizer.params.amsgrad=true is available with torch's implementation only: set torch_adam=true"
        )
    return problems


def torch_name(name: str) -> str | None:
    """Return the class of torch.optim of that name in any case, None if there is none."""
    classes = classes_of(torch_classes.OPTIMIZERS)
    return (
        name
        if name in classes
        else next((one for one in sorted(classes) if one.lower() == name.lower()), None)
    )


def settings_of(params: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments without those that are "auto", which means: as if the key were not there."""
    settings = {key: value for key, value in (params or {}).items() if value != "auto" or key in TAKES_AUTO}
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    return settings


def _unknown_keys(name: str, settings: dict[str, Any]) -> list[str]:
    key = name.lower()
    allowed = set(ARGUMENTS.get(key, ()))
    of_torch = (
        OF_TORCH.get(key, "AdamW" if settings.get("torch_adam") else None) if allowed else torch_name(name)
    )
    if of_torch is not None:
        allowed |= set(arguments_of(torch_classes.OPTIMIZERS, of_torch)[1:])
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
    """List keys that ask for small states beside keys that choose an implementation without them."""
    small = [key for key in COMPACT_KEYS if settings.get(key) not in (None, 32, False)]
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
