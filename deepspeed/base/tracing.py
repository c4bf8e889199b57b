"""Keep code outside of `torch.compile` and of `torch.func` transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Act as `torch.compiler.disable(function)`, without the half second of importing the compiler: neither the
    function nor its callees are compiled.

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


# ---- the transforms of `torch.func` (`grad`, `vmap`, `jvp`, ...)
#
# Inside a transform every torch operation is interpreted: tensors created there are wrappers without memory, and
# autograd runs over values that are not gradients of the training step. Code that works on memory has to leave the
# transform.


P = ParamSpec("P")
R = TypeVar("R")

inside_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether the caller runs under `torch.func.grad`, `vmap`, `jvp` or a similar transform."""


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context in which tensors are plain tensors, even under a transform."""
    if not inside_transform():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def call_outside_transforms(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function`` outside of any transform; without one there is no overhead."""
    if not inside_transform():
        return function(*args, **kwargs)
    with outside_transforms():
        return function(*args, **kwargs)
