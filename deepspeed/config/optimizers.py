"""Checks of an `optimizer` section: the optimizers' names, and the arguments of each.

Built-in names are case-insensitive; every other name is a class of `torch.optim`. Nothing is built or imported, so that
errors here can be reported with all others. A new optimizer is a class and a row of `BUILT_IN`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed.config.arguments import OPTIMIZER, TAKES_AUTO, unquote_hint, wrong_arguments
from deepspeed.config.problems import MAX_LISTED, cut, nearest, shown

# Names of the installed torch's optimizers and schedules, and of their arguments.
#
# `ds_check` needs nothing else of torch, whose import takes seconds. So they are parsed from torch's source, unless
# torch is loaded; then the classes themselves are inspected, including any that a script has added.


OPTIMIZERS, SCHEDULES = "torch.optim", "torch.optim.lr_scheduler"
BASES = {OPTIMIZERS: "Optimizer", SCHEDULES: "LRScheduler"}


def classes_of(module: str) -> set[str]:
    """Return the names of the optimizers or schedules in `module`, which is one of `BASES`."""
    loaded = _loaded(module)
    if loaded is None:
        return _public_classes(module) - {BASES[module]}
    base = getattr(loaded, BASES[module])
    return {
        name
        for name, value in vars(loaded).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and name[0] != "_"
    }


def arguments_of(module: str, name: str) -> dict[str, bool]:
    """Return the constructor arguments of a class of `classes_of(module)`, in order, and whether each is required."""
    found = _constructor(module, name) if _loaded(module) is None else None
    if found is not None:
        return found
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    return {each.name: each.default is each.empty for each in parameters.values()}


def _loaded(module: str) -> ModuleType | None:
    """Return the module if it is loaded, or if its source cannot be found; None: parse the source."""
    if module in sys.modules or _file(module) is None:
        return importlib.import_module(module)
    return None


def _file(module: str) -> Path | None:
    """Find the source of a module without importing it or its package."""
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder).joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@functools.cache
def _tree(module: str) -> ast.Module:
    file = _file(module)
    return ast.parse(file.read_bytes() if file else b"")


def _imports(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield (local name, module, name in that module) of each `from ... import ...`."""
    package = module if module == OPTIMIZERS else module.rpartition(".")[0]  # only OPTIMIZERS is a package
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom):
            source = f"{package}.{node.module}" if node.level else node.module or ""
            yield from ((alias.asname or alias.name, source, alias.name) for alias in node.names)


def _public_classes(module: str) -> set[str]:
    """Return the classes that a module defines, or that a package imports from its submodules."""
    own = {node.name for node in _tree(module).body if isinstance(node, ast.ClassDef)}
    taken = {name for name, source, _ in _imports(module) if source.startswith(f"{module}.")}
    return {name for name in own | taken if name[0].isupper()}


def _constructor(module: str, name: str) -> dict[str, bool] | None:
    """Return a class's arguments after `self` from the source, as `arguments_of` does; None if it is not there."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return dict(list(_in_order(item.args))[1:])
            inherited = (_constructor(module, base.id) for base in node.bases if isinstance(base, ast.Name))
            return next(inherited, None)
    for here, source, there in _imports(module):
        if here == name and source.startswith("torch."):
            return _constructor(source, there)
    return None


def _in_order(arguments: ast.arguments) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether it is required) of each argument."""
    positional = [*arguments.posonlyargs, *arguments.args]
    for place, each in enumerate(positional):
        yield each.arg, place < len(positional) - len(arguments.defaults)
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield each.arg, default is None


COMPACT_KEYS = ("state_bits", "stochastic_rounding")
"""Arguments for compact optimizer states."""

_ADAM = frozenset({"lr", "bias_correction", "betas", "eps", "weight_decay"})
_FUSED_ADAM = _ADAM | {
    *"adam_w_mode amsgrad set_grad_none torch_adam fp32_optimizer_states".split(), *COMPACT_KEYS
}  # fmt: skip
_SGD = frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov"})
_LAMB = _ADAM | {"eps_inside_sqrt", "max_grad_norm", "max_coeff", "min_coeff", "amsgrad"}
_SIGNS = _ADAM | {
    *"deepspeed eps_inside_sqrt max_grad_norm amsgrad cuda_aware comm_backend_name".split()
}  # fmt: skip
_MUON = frozenset(
    {"lr", "momentum", "weight_decay", "muon_lr", "adam_lr", "betas", "eps", "ns_method", "per_head_muon"}
)
_ONE_BIT_LAMB = frozenset(
    {"freeze_step", "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold"}
)
_ZERO_ONE = frozenset({"var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"})
_DILOCO = frozenset({"sync_every", "outer_lr", "outer_momentum", "warmup_steps", "codec"})

_FUSED, _HOST = "ops.adam.fused_adam:FusedAdam", "ops.adam.cpu_adam:DeepSpeedCPUAdam"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """An optimizer that ``optimizer.type`` may name.

    ``path``: its class, as "module:name" under ``deepspeed``; only the class that a run uses is imported.
    ``arguments``: keys of ``optimizer.params``, including those that choose among classes. ``host_path``: the class
    that scripts expect instead when the update is offloaded to host memory; the arithmetic is the same.
    """

    path: str
    arguments: frozenset[str]
    host_path: str | None = None
    updates_columns: bool = False
    """ZenFlow may have it update some columns only: it is elementwise, and has kernels for that."""
    exchanges: bool = False
    """Its ranks exchange momenta or weights between copies, instead of gradients."""


def _built_in(path: str, arguments: frozenset[str], **more: Any) -> BuiltIn:
    return BuiltIn(path=path, arguments=arguments, **more)


BUILT_IN: dict[str, BuiltIn] = {
    "adam": _built_in(_FUSED, _FUSED_ADAM, host_path=_HOST, updates_columns=True),
    "adamw": _built_in(_FUSED, _FUSED_ADAM, host_path=_HOST, updates_columns=True),
    "fusedadam": _built_in(_FUSED, _FUSED_ADAM, updates_columns=True),
    "lamb": _built_in("ops.lamb:FusedLamb", _LAMB),
    "fusedlamb": _built_in("ops.lamb:FusedLamb", _LAMB),
    "lion": _built_in(
        "ops.lion:FusedLion",
        frozenset({"lr", "betas", "weight_decay", "set_grad_none"}),
        host_path="ops.lion:DeepSpeedCPULion",
        updates_columns=True,
    ),
    "adagrad": _built_in(
        "ops.adagrad:Adagrad",
        frozenset({"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"}),
        updates_columns=True,
    ),
    "sgd": _built_in("ops.sgd:SGD", _SGD, updates_columns=True),
    "muon": _built_in("zero.muon.muon_optimizer:build_muon", _MUON),
    "muadam": _built_in("optim.mu_parametrization:mu_adam", _ADAM | {"adam_w_mode"}, updates_columns=True),
    "muadamw": _built_in("optim.mu_parametrization:mu_adamw", _ADAM, updates_columns=True),
    "musgd": _built_in("optim.mu_parametrization:mu_sgd", _SGD, updates_columns=True),
    "onebitadam": _built_in(
        "optim.onebit:OnebitAdam", _SIGNS | {"freeze_step", "variance_interval"}, exchanges=True
    ),
    "onebitlamb": _built_in("optim.onebit:OnebitLamb", _SIGNS | _ONE_BIT_LAMB, exchanges=True),
    "zerooneadam": _built_in("optim.onebit:ZeroOneAdam", _SIGNS | _ZERO_ONE, exchanges=True),
    "diloco": _built_in("optim.local_steps:DiLoCo", _ADAM | _DILOCO, exchanges=True),
}
"""Every name that ``optimizer.type`` accepts in any case, in addition to the classes of torch.optim."""

TORCH_COUNTERPARTS = {"adagrad": "Adagrad", "sgd": "SGD"}
"""Built-in optimizer -> class of torch.optim that is used if a key is given that only it accepts."""


def check_optimizer(name: Any, params: Any = None) -> list[str]:
    """Return the mistakes in an `optimizer` section, as messages to its author."""
    if not isinstance(name, str) or not name:
        return [f"optimizer.type={name!r} must be the name of an optimizer"]
    if params is not None and not isinstance(params, dict):
        return [f"optimizer.params={params!r} must be a mapping of names to values"]
    key = name.lower()
    if key not in BUILT_IN and torch_name(name) is None:
        names = sorted({*BUILT_IN, *classes_of(OPTIMIZERS)})
        return [f"optimizer.type={shown(name)} is unknown{_nearest(name, names)}"]
    settings = settings_of(params)
    problems = _unknown_keys(name, {**(params or {}), **settings})
    problems += _bad_values(settings) + _contradictions(settings)
    if settings.get("amsgrad") and key in BUILT_IN and not settings.get("torch_adam"):
        problems.append("optimizer.params.amsgrad=true needs torch's implementation: set torch_adam=true")
    return problems


def torch_name(name: str) -> str | None:
    """Return the class of torch.optim with that name in any case, None if there is none."""
    classes = classes_of(OPTIMIZERS)
    return (
        name
        if name in classes
        else next((one for one in sorted(classes) if one.lower() == name.lower()), None)
    )


def settings_of(params: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments without those that are "auto", which counts as not given."""
    settings = {key: value for key, value in (params or {}).items() if value != "auto" or key in TAKES_AUTO}
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    return settings


def _unknown_keys(name: str, settings: dict[str, Any]) -> list[str]:
    key = name.lower()
    allowed = set(BUILT_IN[key].arguments) if key in BUILT_IN else set()
    of_torch = (
        TORCH_COUNTERPARTS.get(key, "AdamW" if settings.get("torch_adam") else None)
        if allowed
        else torch_name(name)
    )
    if of_torch is not None:
        allowed |= set(list(arguments_of(OPTIMIZERS, of_torch))[1:])
    problems = []
    for key in settings:
        if len(problems) == MAX_LISTED:
            return [*problems, "optimizer.params has more unknown keys (not listed)"]
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
        f"optimizer.params.{key}={value!r} must be {text}{unquote_hint(value)}"
        for key, value, text, _ in wrong_arguments(settings, OPTIMIZER)
    ]


def _contradictions(settings: dict[str, Any]) -> list[str]:
    """Return errors for compact-state keys together with keys that choose an implementation without them."""
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
