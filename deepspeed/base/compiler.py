"""Documented helpers around `torch.compile` and torch's version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_compile_supported() -> bool:
    """Return whether this torch can compile at all; only use shows whether a backend works here."""
    return hasattr(torch, "compile")


def is_compiling() -> bool:
    """Return whether the caller is being traced by `torch.compile`."""
    return torch.compiler.is_compiling()


def disable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude `func` from tracing (a decorator)."""
    return torch.compiler.disable(func)


def enable(min_version: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that allows tracing, except with torch releases before ``min_version``."""

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        old = min_version is not None and not required_torch_version(min_version=min_version)
        return disable(func) if old else func

    return decorate


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Return whether the installed torch is between two releases, both inclusive: `required_torch_version(2.6)`.

    Releases are compared by major and minor number. A float cannot distinguish release 2.1 from 2.10; pass that one
    as a string, "2.10".
    """
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version needs min_version, max_version or both")
    installed = _numbers(torch.__version__)
    if min_version is not None and installed < _numbers(str(min_version)):
        return False
    return max_version is None or installed <= _numbers(str(max_version))
