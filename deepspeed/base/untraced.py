"""Keeping `torch.compile` out of a function without importing the compiler, which takes half a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """`torch.compiler.disable(function)`: neither it nor what it calls is compiled.

    The function itself is marked as the compiler's own decorators do: the attribute keeps traced callers from
    inlining it, the strategy of its code keeps the compiler away from its frame and those below.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # other releases of torch keep the strategy elsewhere
        return torch.compiler.disable(function)  # type: ignore[return-value]
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = None
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
