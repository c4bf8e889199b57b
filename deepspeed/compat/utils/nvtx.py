"""Named ranges for profilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from deepspeed.base.accelerator import get_accelerator

enable_nvtx = True
"""True to record calls as ranges; may be set by a program."""
DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"
"""Domain of the ranges, if the accelerator supports domains."""
is_compiling = torch.compiler.is_compiling

P = ParamSpec("P")
R = TypeVar("R")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Record each call of ``func`` as a range of its name; compiled code records none."""

    @functools.wraps(func)
    def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
        if not enable_nvtx or is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        has_domains = getattr(accelerator, "supports_nvtx_domain", False)
        domain: dict[str, str] = {"domain": DEEPSPEED_NVTX_DOMAIN} if has_domains else {}
        accelerator.range_push(func.__qualname__, **domain)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop(**domain)

    return ranged
