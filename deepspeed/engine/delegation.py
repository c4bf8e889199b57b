"""Methods of the engine that one of its parts answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def answered_by(part: str, method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """A method of the engine with the signature and the docstring of ``method``, which is called on the engine's
    attribute ``part``: ``compile = answered_by("compilation", Compilation.compile)``."""
    name = method.__name__

    @functools.wraps(method)
    def answer(engine: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return getattr(getattr(engine, part), name)(*args, **kwargs)

    return answer
