"""Hooks on the calls of a module, and replacements of its forward."""

from __future__ import annotations

from typing import Any

from torch import nn

_TRL = "trl.trainer.utils", "_fused_forward"
"""The module and the name of the forward that TRL's trainers put in the place of a model's own."""
_ORIGINAL = "original_forward"
"""Its variable with the model's own."""


def is_heard(module: nn.Module) -> bool:
    """Return whether this module itself, not one inside it, has hooks."""
    found = vars(module).get("forward")
    hooked = module._forward_pre_hooks or module._forward_hooks
    return bool(hooked) or (found is not None and harmless_forward(module) is not found)


def harmless_forward(module: nn.Module) -> Any:
    """Return the function that replaces the module's forward and calls it unchanged whenever logits are asked for; or
    None. TRL's trainers have such a one: log-probabilities of given tokens without the logits, where an argument
    says so."""
    found = vars(module).get("forward")
    function: Any = getattr(found, "__func__", None)
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or (names.get("__name__"), code.co_name) != _TRL or _ORIGINAL not in code.co_freevars:
        return None
    original = function.__closure__[code.co_freevars.index(_ORIGINAL)].cell_contents
    own = getattr(original, "__func__", None) is type(module).forward and original.__self__ is module
    return found if own else None
