"""Hooks and the transforms of `torch.func` (`grad`, `vmap`, `jvp`, ...).

Inside a transform every torch operation is interpreted: a tensor made there is a wrapper without its own memory,
and autograd runs over values that are not gradients of the training step. Code that works on memory has to step
outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

inside_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Tells whether the caller runs under `torch.func.grad`, `vmap`, `jvp` or a similar transform."""


def outside_transforms() -> AbstractContextManager[object]:
    """A context in which tensors are plain tensors, even if a transform is active around it."""
    if not inside_transform():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def call_outside_transforms(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """``function(...)`` in such a context, without the cost of one where no transform is active."""
    if not inside_transform():
        return function(*args, **kwargs)
    with outside_transforms():
        return function(*args, **kwargs)
