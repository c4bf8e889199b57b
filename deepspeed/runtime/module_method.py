"""``module.zero_grad()`` on the module itself, as scripts call it that also use the module without its engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleZeroGrad:
    """Stands in for ``module.zero_grad`` and also calls ``drop``: from stage 1 on an engine keeps gradients elsewhere
    than in ``param.grad``. ``drop`` is a method of the engine, which is not kept alive.

    [Note: copies] The stand-in is an attribute of this one module. Copies and pickles of the module have the method of
    their class in its place: it reduces to that.
    """

    def __init__(self, module: nn.Module, drop: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._drop = weakref.WeakMethod(drop)
        vars(module)["zero_grad"] = self

    def __call__(self, set_to_none: bool = True) -> None:
        module, drop = self._module(), self._drop()
        if module is not None:
            type(module).zero_grad(module, set_to_none)
        if drop is not None:
            drop()

    def remove(self) -> None:
        """Give the module its own method back, unless an engine made since has replaced it."""
        module = self._module()
        if module is not None and vars(module).get("zero_grad") is self:
            del vars(module)["zero_grad"]

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "zero_grad")  # of a copy in the making, which has only its class's
