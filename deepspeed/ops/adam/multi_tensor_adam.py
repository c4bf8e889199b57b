"""Arithmetic shared by FusedAdam and DeepSpeedCPUAdam.

D. P. Kingma, J. Ba: Adam: A Method for Stochastic Optimization (ICLR 2015); I. Loshchilov, F. Hutter:
Decoupled Weight Decay Regularization (ICLR 2019). All constants are computed in fp64 and rounded to fp32 once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.multi_tensor import Launch, MultiTensorOptimizer, foreach_sqrt
from deepspeed.ops.update import Group, Tensors, corrections

_DECOUPLED_KEYS = ("adam_w_mode", "adamw_mode")
"""The same option, under FusedAdam's and DeepSpeedCPUAdam's name."""


def as_in(group: Group, options: dict[str, Any]) -> dict[str, Any]:
    """Rename saved ``options`` for the optimizer of ``group``, which may be a different Adam than the one that was
    saved: with and without offload they differ."""
    own = next((key for key in _DECOUPLED_KEYS if key in group), None)
    return {own if own and key in _DECOUPLED_KEYS else key: value for key, value in options.items()}


def adam_defaults(
    lr: float,
    bias_correction: bool,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    decoupled_key: str = "adam_w_mode",
) -> dict[str, Any]:
    """Return the hyperparameters of a group for `torch.optim.Optimizer`."""
    return {
        "lr": lr,
        "bias_correction": bias_correction,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        decoupled_key: bool(decoupled),
    }


class MultiTensorAdam(MultiTensorOptimizer):
    """Base of Adam optimizers. Groups hold lr, betas, eps, weight_decay, bias_correction, and under `decoupled_key`
    whether weight decay is applied to the parameter (AdamW) or added to the gradient (Adam with L2)."""

    state_names = ("exp_avg", "exp_avg_sq")
    kernel_name, kernel_factors = "ds_adam", ("lr", "betas", "eps", "weight_decay")
    decoupled_key = "adam_w_mode"

    @property
    def kernel_switches(self) -> tuple[str, ...]:  # type: ignore[override]  # follows a subclass's key
        return "bias_correction", self.decoupled_key

    def _has_kernel(self, param: Tensor) -> bool:
        if param.is_cpu:
            return super()._has_kernel(param)
        from deepspeed.ops import gpu

        return gpu.usable(param)

    def _device_update(self, launch: Launch, steps: list[int], group: Group, grad_scale: float) -> None:
        from deepspeed.ops.adam import triton_adam  # imports triton

        triton_adam.step(launch, steps, group, decoupled=group[self.decoupled_key], grad_scale=grad_scale)

    def _torch_update(
        self,
        group: Group,
        params: Tensors,
        grads: Tensors,
        states: list[Tensors],
        steps: list[int],
        *,
        scaled_moments: bool = False,
    ) -> None:
        """See the base class. ``scaled_moments``: the moments are already multiplied by their betas."""
        beta1, beta2 = group["betas"]
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        exp_avgs, exp_avg_sqs = states
        step_sizes, inv_corrections = zip(*(corrections(group, step) for step in steps), strict=True)
        if weight_decay != 0 and not group[self.decoupled_key]:
            grads = list(torch._foreach_add(grads, torch._foreach_mul(params, weight_decay)))
        if not scaled_moments:
            torch._foreach_mul_(exp_avgs, beta1)
            torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_add_(exp_avgs, torch._foreach_mul(grads, 1.0 - beta1))
        squares = torch._foreach_mul(grads, 1.0 - beta2)
        torch._foreach_mul_(squares, grads)
        torch._foreach_add_(exp_avg_sqs, squares)
        denominators = foreach_sqrt(exp_avg_sqs)
        torch._foreach_mul_(denominators, inv_corrections)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_mul(exp_avgs, step_sizes)
        torch._foreach_div_(updates, denominators)
        if weight_decay != 0 and group[self.decoupled_key]:
            torch._foreach_mul_(params, 1.0 - lr * weight_decay)
        torch._foreach_sub_(params, updates)
