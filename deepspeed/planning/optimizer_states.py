"""Bytes of optimizer state per element, measured by one step of a stand-in optimizer on a tiny matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.logging import logger
from deepspeed.ops.update import traits_of
from deepspeed.optim.initial_state import clone_optimizer

_SHAPE = (4, 4)


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of optimizer state: per element for each tensor of the parameter's shape, per block of ``block`` elements,
    and per tensor for the rest."""

    per_element: tuple[int, ...] = (4, 4)
    per_tensor: int = 4
    per_block: int = 0
    block: int = 1

    def besides(self, numel: int) -> int:
        """Return the bytes of a fragment of ``numel`` elements in addition to its per-element state."""
        return self.per_tensor + self.per_block * -(-numel // self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerProfile:
    """Facts about an optimizer. ``groups[g]``: state sizes of optimizer group g."""

    name: str
    groups: tuple[StateSize, ...]
    fused: bool
    """Whether the update is one pass over memory without copies of gradients (``step_fragments``)."""
    elementwise: bool
    """Whether tensors may be updated in pieces."""
    grain: int = 1
    """Pieces begin at multiples of this many elements."""


ADAM = OptimizerProfile(name="Adam", groups=(StateSize(),), fused=True, elementwise=True)
"""Assumed if no optimizer is known."""


def profile_optimizer(optimizer: torch.optim.Optimizer, master: torch.dtype | None) -> OptimizerProfile:
    """Describe ``optimizer``, whose parameters may be on the meta device; it is not changed.

    ``master``: dtype of the master weights that it updates; None: the dtype of its parameters.
    """
    groups: list[StateSize] = []
    traits = traits_of(optimizer)
    for group in optimizer.param_groups:
        own = group["params"][0].dtype if group["params"] else torch.float32
        groups.append(_state_size(optimizer, group, master or own))
    return OptimizerProfile(
        name=type(optimizer).__name__,
        groups=tuple(groups),
        fused=traits.fused,
        elementwise=not traits.joins_ranks,
        grain=traits.grain,
    )


def _state_size(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> StateSize:
    param = torch.nn.Parameter(torch.zeros(_SHAPE, dtype=dtype))
    substitute = clone_optimizer(optimizer, group, [param])
    param.grad = torch.ones_like(param)
    try:
        with torch.enable_grad():
            type(optimizer).step(substitute)
    except Exception as error:  # a foreign optimizer may raise anything: its state size is unknown
        logger.debug(
            f"{type(optimizer).__name__} cannot be run: {error}; assuming two fp32 values per element"
        )
        return StateSize()
    state = substitute.state[param]
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    traits = traits_of(optimizer)
    others = [t for t in tensors if t.shape != param.shape]
    blocks = [t for t in others if traits.coded and t.dim()]  # one value: the tiny matrix is a single block
    return StateSize(
        per_element=tuple(t.element_size() for t in tensors if t.shape == param.shape),
        per_tensor=sum(t.numel() * t.element_size() for t in others if not any(t is b for b in blocks)),
        per_block=sum(t.element_size() for t in blocks),
        block=traits.grain,
    )
