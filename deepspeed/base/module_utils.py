"""Access module attributes by dotted names such as ``"layers.0.mlp"``, and module hooks."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import nn

_FULL = "_is_full_backward_hook"
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", _FULL,
)  # fmt: skip


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the call hooks of ``old`` to its replacement ``new``, after its own hooks. The dicts are shared, so that
    handles still remove them."""
    for name in _HOOKS:
        found: Any = getattr(old, name)
        own: Any = getattr(new, name)
        if name != _FULL and own is not found:
            mine, theirs = dict(own), dict(found)
            found.clear()
            found.update({**mine, **theirs})
        if found is not None:
            vars(new)[name] = found


def clear_hooks(module: nn.Module) -> None:
    """Remove the call hooks of ``module`` and its submodules."""
    for each in module.modules():
        for name in _HOOKS[:-1]:
            getattr(each, name).clear()


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)
