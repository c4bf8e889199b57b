"""Methods of a module that its engine answers, for scripts that also use the module without its engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleMethod:
    """Stands in for ``module.name``: ``answer``, a method of the engine, is called instead. The engine is not kept
    alive; once it is gone, the module's own method is called.

    [Note: copies] The stand-in is an attribute of this one module. Copies and pickles of the module have the method of
    their class in its place: it reduces to that.
    """

    def __init__(self, module: nn.Module, name: str, answer: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._answer = weakref.WeakMethod(answer)
        vars(module)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._answer()
        if answer is not None:
            return answer(*args, **kwargs)
        module = self._module()
        return getattr(type(module), self._name)(module, *args, **kwargs)

    def remove(self) -> None:
        """Give the module its own method back, unless an engine made since has replaced it."""
        module = self._module()
        if module is not None and vars(module).get(self._name) is self:
            del vars(module)[self._name]

    def __reduce__(self) -> Any:
        return getattr, (self._module(), self._name)  # of a copy in the making, which has only its class's
