"""RNG control in tensor-parallel blocks: modules that draw equal, or different, random numbers on all ranks.

Dropout of replicated tensors must be equal on all ranks; dropout of split tensors must differ.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from deepspeed.base.tracing import untraced
from deepspeed.transforms.recompute.rng import RegionRNG


def draw_differently(module: nn.Module, numbers: RegionRNG) -> nn.Module:
    """Make the forward of ``module`` draw different random numbers on each rank. Returns ``module``, whose class is
    replaced by a subclass. Use one ``numbers`` for all modules of a model."""
    return _convert(module, numbers, _Different)


def draw_equally(module: nn.Module, numbers: RegionRNG) -> nn.Module:
    """Make the forward of ``module``, nested in one that draws differently, draw the same numbers on all ranks."""
    return _convert(module, numbers, _Equal)


class _Different(nn.Module):
    numbers: RegionRNG

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with self.numbers.different():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _Equal(nn.Module):
    numbers: RegionRNG

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.numbers.equal():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def _convert(module: nn.Module, numbers: RegionRNG, how: type[nn.Module]) -> nn.Module:
    if numbers.group.size == 1:
        return module
    if not isinstance(module, how):
        module.__class__ = _drawing_class(how, type(module))
    drawing: Any = module
    drawing.numbers = numbers
    return module


@functools.cache
def _drawing_class(how: type, original: type) -> type:
    return type(original.__name__, (how, original), {"__module__": original.__module__})
