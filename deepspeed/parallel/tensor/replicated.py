"""Replicated modules that each tensor-parallel rank uses for a part of the work.

Norms on sequence shards, or routers whose scores weight only this rank's experts: each rank has a partial gradient, and
these are summed over ranks in backward, before they reach the parameter, at every ZeRO stage.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from deepspeed.base.sharded import full_shape
from deepspeed.base.tracing import untraced
from deepspeed.checkpoint.placement import place
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.cuts import replicated
from deepspeed.parallel.tensor.mappings import shared_weight


def sum_gradients(module: nn.Module, group: Communicator) -> nn.Module:
    """Sum the gradients of ``module``'s direct parameters over ``group`` from now on. Returns ``module``, whose class
    is replaced by a subclass.

    ValueError: it has no direct parameters.
    """
    if group.size == 1:
        return module
    if not any(True for _ in module.parameters(recurse=False)):
        raise ValueError(f"{type(module).__name__} has no parameters of its own")
    mark_replicated(module, group)
    if not isinstance(module, _Summing):
        module.__class__ = _summing_class(type(module))
    summing: Any = module
    summing.gradient_group = group
    return module


def mark_replicated(module: nn.Module, group: Communicator) -> None:
    """Mark the module's direct parameters as replicated over ``group``: they start from the first rank's values."""
    for param in module.parameters(recurse=False):
        place(param, replicated(full_shape(param), group.rank))


class _Summing(nn.Module):
    gradient_group: Communicator

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with its parameters replaced by tensors whose gradients are summed."""
        own = self._parameters
        summed: dict[str, Any] = {
            name: None if param is None else shared_weight(param, self.gradient_group)
            for name, param in own.items()
        }
        self._parameters = summed
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._parameters = own


@functools.cache
def _summing_class(original: type) -> type:
    return type(original.__name__, (_Summing, original), {"__module__": original.__module__})
