"""Lion: FusedLion on any device, and DeepSpeedCPULion on the host, for offloaded training.

X. Chen et al.: Symbolic Discovery of Optimization Algorithms (2023), algorithm 2: the update is the sign of one
interpolation between momentum and gradient, the new momentum is another; weight decay is decoupled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.fused import FusedOptimizer
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.update import Group, Tensors


class MultiTensorLion(MultiTensorOptimizer):
    """Base of both. Groups have lr, betas, weight_decay."""

    state_names = ("exp_avg",)
    kernel_name, kernel_factors = "ds_lion", ("lr", "betas", "weight_decay")

    def _torch_update(
        self, group: Group, params: Tensors, grads: Tensors, states: list[Tensors], steps: list[int]
    ) -> None:
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        (exp_avgs,) = states
        directions = torch._foreach_mul(exp_avgs, beta1)
        torch._foreach_add_(directions, torch._foreach_mul(grads, 1.0 - beta1))
        torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        torch._foreach_sub_(params, torch._foreach_mul([_sign(d) for d in directions], lr))
        torch._foreach_mul_(exp_avgs, beta2)
        torch._foreach_add_(exp_avgs, torch._foreach_mul(grads, 1.0 - beta2))


def _sign(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x, x.sign())


class FusedLion(FusedOptimizer, MultiTensorLion):
    """Lion, one kernel per group of tensors."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.set_grad_none = set_grad_none


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
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(model_params, {**defaults, "fp32_optimizer_states": fp32_optimizer_states})
