"""Updates of single tensors without an optimizer object: the documented functions of the optimizers' ops.

A caller makes an optimizer under a number of its choice, and passes to each update the tensors, their state and all
hyperparameters that can change. One of our optimizers does the work, which is given that state for the one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.multi_tensor import MultiTensorOptimizer

_made: dict[tuple[str, int], MultiTensorOptimizer] = {}


def create(kind: str, optimizer_id: int, optimizer: MultiTensorOptimizer) -> int:
    """Keep ``optimizer`` under its number, instead of an earlier one; 0."""
    _made[kind, optimizer_id] = optimizer
    return 0


def destroy(kind: str, optimizer_id: int) -> int:
    """Forget it, if it is there; 0."""
    _made.pop((kind, optimizer_id), None)
    return 0


def update(
    kind: str,
    optimizer_id: int,
    step: int,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    **hyperparameters: Any,
) -> int:
    """The update number ``step`` (from 1) of ``params`` and ``states``, in place; 0. ValueError: no such optimizer."""
    optimizer = _made.get((kind, optimizer_id))
    if optimizer is None:
        raise ValueError(f"{kind}_update: there is no optimizer {optimizer_id}; call create_{kind} first")
    apply(optimizer, step, params, grads, states, **hyperparameters)
    return 0


def apply(
    optimizer: MultiTensorOptimizer,
    step: int,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    **hyperparameters: Any,
) -> None:
    """The same with the optimizer itself, which keeps nothing of it. ValueError: lists of different lengths."""
    lengths = {len(params), len(grads), *map(len, states.values())}
    if len(lengths) > 1:
        raise ValueError(
            f"parameters, gradients and states are lists of one length, not of {sorted(lengths)}"
        )
    group = optimizer.param_groups[0]
    group.update(hyperparameters)
    for position, param in enumerate(params):
        optimizer.state[param] = {
            "step": torch.tensor(float(step - 1)),
            **{name: tensors[position] for name, tensors in states.items()},
        }
    try:
        with torch.no_grad():
            optimizer.multi_tensor_step(group, params, grads)
        torch.autograd.graph.increment_version(params)
    finally:
        optimizer.state.clear()
        optimizer.forget_tables()
