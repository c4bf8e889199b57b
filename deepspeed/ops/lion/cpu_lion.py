"""DeepSpeedCPULion: host Lion for offloaded training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import direct_updates
from deepspeed.ops.lion.multi_tensor_lion import MultiTensorLion


class DeepSpeedCPULion(MultiTensorLion):
    """Lion on host memory; `fp32_optimizer_states=False` keeps the momentum in the parameter's dtype."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "fp32_optimizer_states": fp32_optimizer_states,
        }
        super().__init__(model_params, defaults)

    @property
    def fp32_optimizer_states(self) -> bool:
        """Return whether the momentum is fp32, whatever dtype the parameters have."""
        return self.defaults["fp32_optimizer_states"]


# The documented functions of the op, for callers without an optimizer object.


def create_lion(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    weight_decay: float = 0,
    should_log: bool = False,
) -> int:
    """Make the optimizer ``optimizer_id``; its hyperparameters are passed to each update."""
    made = DeepSpeedCPULion([torch.empty(0)], alpha, (betta1, betta2), weight_decay)
    return direct_updates.create("lion", optimizer_id, made)


def destroy_lion(optimizer_id: int) -> int:
    return direct_updates.destroy("lion", optimizer_id)


def lion_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
) -> int:
    """Update number ``step`` (from 1) of ``params`` and the momentum, in place. Returns 0.

    Raises:
        ValueError: there is no optimizer of this number.
    """
    values = {"lr": lr, "betas": (beta1, beta2), "weight_decay": weight_decay}
    states = {"exp_avg": [exp_avg]}
    return direct_updates.update("lion", optimizer_id, step, [params], [grads], states, **values)
