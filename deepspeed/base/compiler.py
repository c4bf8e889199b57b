"""Questions of client code about `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.base.torch import required_torch_version


def is_compile_supported() -> bool:
    """Tell whether this torch can compile at all; only use shows whether a backend works here."""
    return hasattr(torch, "compile")


def is_compiling() -> bool:
    """Tell whether the caller is being traced by `torch.compile`."""
    return torch.compiler.is_compiling()


def disable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: never trace into `func`."""
    return torch.compiler.disable(func)


def enable(min_version: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: trace into the function, with releases of torch before ``min_version`` never."""

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        old = min_version is not None and not required_torch_version(min_version=min_version)
        return disable(func) if old else func

    return decorate
