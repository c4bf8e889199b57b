"""Tensors over the memory of others, and results on the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from deepspeed.base.accelerator import get_accelerator


class Allocator:
    """Outputs of kernels that reuse memory."""

    @staticmethod
    def empty_from(tensor: Tensor, shape: Iterable[int]) -> Tensor:
        """A tensor of ``shape`` in the first part of the memory of ``tensor``, which is contiguous. ValueError: it has
        fewer elements."""
        sizes = tuple(shape)
        needed = math.prod(sizes)
        if needed > tensor.numel():
            raise ValueError(f"a tensor of {needed} elements does not fit into one of {tensor.numel()}")
        return tensor.view(-1)[:needed].view(sizes)


empty_from = Allocator.empty_from


def on_device(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``method`` with its result moved to the current device."""

    @functools.wraps(method)
    def moved(*args: Any, **kwargs: Any) -> Tensor:
        return method(*args, **kwargs).to(get_accelerator().current_device_name())

    return moved
