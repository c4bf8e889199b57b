"""Documented names whose feature is yet to come: they import, have their signature, and are refused when called.

`later_table.py` and `later_names.txt` list them by module, one line each:

    def name(a, b=1)                      a function
    class Name(a, b=1): method method     a class; its methods are refused as well
    enum Name(int) A=1 B=2                an enum, which is complete as it is; in parentheses its base, if any
    error Name(ValueError)                an exception, likewise; the base may be in the same module

A line is removed when the name becomes real; `tests/test_architecture.py` finds any that were forgotten.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from deepspeed.compat.later_table import INSTEAD, LATER
from deepspeed.version import __version__

DOC = "Documented; not implemented in this release."


class FeatureNotAvailableError(NotImplementedError):
    """A documented feature was called that this release does not have."""


def names(module: str) -> list[str]:
    """The names of `module` that come later."""
    return [_parse(line)[1] for line in LATER.get(module, ())]


@functools.cache
def make(module: str, name: str) -> Any:
    """The stand-in for `module.name`, always the same object. AttributeError if the tables have no such name."""
    for line in LATER.get(module, ()):
        kind, found, rest, methods = _parse(line)
        if found != name:
            continue
        if kind == "enum":
            return enum.Enum(name, _members(rest), module=module, type=_ENUM_BASES.get(methods[0]))
        if kind == "error":
            return type(name, (_error_base(module, methods[0]),), {"__module__": module})
        return _function(module, name, rest) if kind == "def" else _class(module, name, rest, methods)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def refuse(path: str) -> NoReturn:
    prefixes = [prefix for prefix in INSTEAD if path.startswith(prefix)]
    instead = f" {INSTEAD[max(prefixes, key=len)]}" if prefixes else ""
    message = f"{path} is documented but not implemented in deepspeed {__version__}.{instead}"
    raise FeatureNotAvailableError(message)


def signature(text: str) -> inspect.Signature:
    """`(a, *, b=1)` as a Signature. A default that is not a literal is kept as its source text."""
    arguments = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    kinds = inspect.Parameter
    positional = [
        *((a, kinds.POSITIONAL_ONLY) for a in arguments.posonlyargs),
        *((a, kinds.POSITIONAL_OR_KEYWORD) for a in arguments.args),
    ]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parameters = [_parameter(a.arg, kind, d) for (a, kind), d in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg.arg, kinds.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument.arg, kinds.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg.arg, kinds.VAR_KEYWORD, None))
    return inspect.Signature(parameters)


class _Spelling:
    """A documented default that only exists together with its feature."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _parameter(name: str, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    if default is None:
        return inspect.Parameter(name, kind)
    try:
        value = ast.literal_eval(default)
    except ValueError:
        value = _Spelling(ast.unparse(default))
    return inspect.Parameter(name, kind, default=value)


def _parse(line: str) -> tuple[str, str, str, list[str]]:
    """kind, name, what follows the name, methods (of an enum or error: its base)."""
    kind, _, rest = line.partition(" ")
    if kind in ("enum", "error"):
        head, _, members = rest.partition(" ")
        name, _, base = head.rstrip(")").partition("(")
        return kind, name, members, [base]
    name, _, rest = rest.partition("(")
    text, _, methods = rest.rpartition(")")
    return kind, name, f"({text})", methods.lstrip(": ").split()


_ENUM_BASES: dict[str, type] = {"int": int, "str": str}


def _error_base(module: str, base: str) -> type[Exception]:
    if not base:
        return Exception
    return getattr(builtins, base, None) or getattr(importlib.import_module(module), base)


def _members(text: str) -> dict[str, Any]:
    return {key: ast.literal_eval(value) for key, _, value in (part.partition("=") for part in text.split())}


def _function(module: str, name: str, text: str, path: str | None = None) -> Callable[..., Any]:
    path = path or f"{module}.{name}"

    def later(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(path)

    later.__module__, later.__name__, later.__qualname__ = module, name, path.removeprefix(f"{module}.")
    later.__doc__ = DOC
    later.__signature__ = signature(text)  # type: ignore[attr-defined]
    return later


class _Later(type):
    """Metaclass of classes that come later: they can be named, subclassed and used with isinstance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        documented = next(base for base in cls.__mro__ if "_later_path" in vars(base))
        refuse(documented._later_path)


def _class(module: str, name: str, text: str, methods: list[str]) -> type:
    path = f"{module}.{name}"
    body: dict[str, Any] = {
        method: staticmethod(_function(module, method, "(*args, **kwargs)", f"{path}.{method}"))
        for method in methods
    }
    body.update(
        __module__=module,
        __doc__=DOC,
        __signature__=signature(text),
        _later_path=path,
    )
    return _Later(name, (), body)
