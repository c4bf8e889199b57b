"""Named ranges for profilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from deepspeed.accelerator import get_accelerator

P = ParamSpec("P")
R = TypeVar("R")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Shows each call of ``func`` as a range named after it; compiled code gets no ranges."""

    @functools.wraps(func)
    def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        accelerator.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return ranged
