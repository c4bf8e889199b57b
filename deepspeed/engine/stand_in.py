"""Methods of a module or an optimizer that its engine answers, for scripts that call them beside the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class MethodStandIn:
    """Stands in for ``owner.name``: ``answer``, a method of the engine, is called instead. The engine is not kept
    alive; once it is gone, the owner's own method is called.

    [Note: copies] The stand-in is an attribute of this one object. Copies and pickles of it have the method of their
    class in its place: it reduces to that.
    """

    def __init__(self, owner: Any, name: str, answer: Callable[..., Any]) -> None:
        self._owner: weakref.ref[Any] = weakref.ref(owner)
        self._name = name
        self._answer = weakref.WeakMethod(answer)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._answer()
        if answer is not None:
            return answer(*args, **kwargs)
        owner = self._owner()
        return getattr(type(owner), self._name)(owner, *args, **kwargs)

    def remove(self) -> None:
        """Give the owner its own method back, unless an engine made since has replaced it."""
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is self:
            del vars(owner)[self._name]

    def __reduce__(self) -> Any:
        return getattr, (self._owner(), self._name)  # of a copy in the making, which has only its class's
