"""Mark modules as leaves for ZeRO stage 3.

All parameters inside a leaf are gathered together when it is called: for modules that use only some of their
submodules in a forward pass (mixture of experts), or call them in a varying order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.base.sharded import full_numel

if TYPE_CHECKING:
    from deepspeed.config.sections.zero import DeepSpeedZeroConfig, DeepSpeedZeroLeafModuleConfig

MARK = "_z3_leaf"
PARAMETER_MARK = "ds_z3_leaf_module"  # set on parameters by ZeRO stage 3


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module itself is a leaf."""
    return bool(getattr(model, MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return whether ZeRO stage 3 gathers this parameter with its leaf."""
    return hasattr(model, PARAMETER_MARK)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return all leaves in ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark this one module."""
    setattr(model, MARK, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of these classes and return them.

    Args:
        leaf_module_classes: Classes (subclasses count), or class names, short or with their module's path.
        raise_if_not_found: Raise ValueError if there is no such module.
    """
    return _mark_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark all modules of these classes and return them."""
    return _mark_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in ``model.named_modules()``. Return them, and the names not found.

    ValueError if ``raise_if_not_found`` and none of them exists.
    """
    modules = dict(model.named_modules())
    found = [modules[name] for name in module_names if name in modules]
    missing = [name for name in module_names if name not in modules]
    return _mark(model, found, flag, f"named {list(module_names)}", raise_if_not_found), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose name ends with one of the suffixes. Return them, and the suffixes without a match."""
    found: list[nn.Module] = []
    matched: set[str] = set()
    for name, module in model.named_modules():
        hits = {suffix for suffix in module_name_suffixes if name.endswith(suffix)}
        if hits:
            found.append(module)
            matched |= hits
    missing = [suffix for suffix in module_name_suffixes if suffix not in matched]
    what = f"with a name ending in one of {list(module_name_suffixes)}"
    return _mark(model, found, flag, what, raise_if_not_found), missing


def apply_zero_leaf_module_config(
    model: nn.Module, leaf_cfg: DeepSpeedZeroLeafModuleConfig | None
) -> list[nn.Module]:
    """Mark the modules that the config section lists, and return them. Entries that the model does not have are
    skipped: the default list holds classes of several model families."""
    if leaf_cfg is None:
        return []
    by_class = set_z3_leaf_modules(model, leaf_cfg.classes, raise_if_not_found=False)
    by_name, _ = set_z3_leaf_modules_by_name(model, leaf_cfg.names, raise_if_not_found=False)
    by_suffix, _ = set_z3_leaf_modules_by_suffix(model, leaf_cfg.name_suffixes, raise_if_not_found=False)
    return list({id(module): module for module in (*by_class, *by_name, *by_suffix)}.values())


def _mark_by_class(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    for item in classes:
        if not isinstance(item, (type, str)):
            raise ValueError(f"leaf_module_classes holds {item!r}: expected classes or class names.")
    types = tuple(item for item in classes if isinstance(item, type))
    names = {item for item in classes if isinstance(item, str)}
    found = []
    for module in model.modules():
        cls = type(module)
        if isinstance(module, types) or not names.isdisjoint(
            (cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")
        ):
            found.append(module)
    return _mark(model, found, flag, f"of class {list(classes)}", raise_if_not_found)


def _mark(
    model: nn.Module, found: list[nn.Module], flag: bool, what: str, raise_if_not_found: bool
) -> list[nn.Module]:
    if not found and raise_if_not_found:
        raise ValueError(f"{type(model).__name__} has no module {what}; see model.named_modules().")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def mark_leaves(module: nn.Module, zero: DeepSpeedZeroConfig) -> None:
    """Mark the leaf modules of the config, and the parameters of all leaves (``z3_leaf_parameter``)."""
    apply_zero_leaf_module_config(module, zero.leaf_module)
    if zero.module_granularity_threshold > 0:
        for fine in fine_grained(module, zero.module_granularity_threshold):
            set_z3_leaf_module(fine, True)
    for name, leaf in module.named_modules():
        if z3_leaf_module(leaf):
            for param in leaf.parameters():
                setattr(param, PARAMETER_MARK, name)


def fine_grained(module: nn.Module, threshold: int) -> list[nn.Module]:
    """Return the outermost modules with fewer than ``threshold`` parameter elements per module inside them.

    The documented measure is elements / (1 + descendants). Modules without a ``forward`` (``ModuleList``) and modules
    without children are skipped: there is nothing to join.
    """
    descendants = sum(1 for _ in module.modules()) - 1
    elements = sum(full_numel(p) for p in module.parameters())
    called = type(module).forward is not nn.Module.forward
    if called and descendants and 0 < elements < threshold * (1 + descendants):
        return [module]
    return [found for child in module.children() for found in fine_grained(child, threshold)]
