"""What client code asks about `torch.compile` (`deepspeed.runtime.compiler`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_compile_supported() -> bool:
    """Whether this torch can compile at all; whether a backend works here shows only in use."""
    return hasattr(torch, "compile")


def is_compiling() -> bool:
    """Whether the caller is being traced by `torch.compile`."""
    return torch.compiler.is_compiling()


def disable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: never trace into `func`."""
    return torch.compiler.disable(func)
