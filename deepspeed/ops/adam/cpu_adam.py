"""DeepSpeedCPUAdam: host Adam for offloaded training."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import direct_updates
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam
from deepspeed.ops.multi_tensor import refuse


class DeepSpeedCPUAdam(MultiTensorAdam):
    """Adam (`adamw_mode=False`) or AdamW on host memory, fp32, bf16 or fp16 parameters and gradients.

    `fp32_optimizer_states=False` keeps the moments in the parameter's dtype, which halves their memory for
    16-bit parameters. `amsgrad` is in the signature but not available.
    """

    decoupled_key = "adamw_mode"
    _ids = itertools.count()

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse("DeepSpeedCPUAdam", amsgrad=amsgrad)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
            "adamw_mode": bool(adamw_mode),
            "fp32_optimizer_states": fp32_optimizer_states,
        }
        super().__init__(model_params, defaults)
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        self.opt_id = next(DeepSpeedCPUAdam._ids)

    @functools.cached_property
    def ds_opt_adam(self) -> ModuleType:
        """The op's functions, with an optimizer made under ``opt_id``: for updates of one's own."""
        group = self.defaults
        beta1, beta2 = group["betas"]
        decay, decoupled = group["weight_decay"], group["adamw_mode"]
        create_adam(self.opt_id, group["lr"], beta1, beta2, group["eps"], decay, decoupled)
        return sys.modules[__name__]


# The documented functions of the op, for callers without an optimizer object.


def create_adam(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0,
    adamw_mode: bool = True,
    should_log: bool = False,
) -> int:
    """Make the optimizer ``optimizer_id``, AdamW or (``adamw_mode=False``) Adam; the rest is passed to each update."""
    made = DeepSpeedCPUAdam(
        [torch.empty(0)], alpha, True, (betta1, betta2), eps, weight_decay, False, adamw_mode
    )
    return direct_updates.create("adam", optimizer_id, made)


def destroy_adam(optimizer_id: int) -> int:
    return direct_updates.destroy("adam", optimizer_id)


def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Update number ``step`` (from 1) of ``params`` and both moments, in place. Returns 0.

    Raises:
        ValueError: there is no optimizer of this number.
    """
    lists = [params], [grads], [exp_avg], [exp_avg_sq]
    return adam_update_multi(
        optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, *lists, []
    )


def adam_update_multi(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    stale_params: Sequence[Tensor],
    parallel: bool = True,
) -> int:
    """`adam_update` of several tensors at once; ``stale_params``, if not empty, receive the new parameters."""
    states = {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    values = {"lr": lr, "betas": (beta1, beta2), "eps": epsilon, "weight_decay": weight_decay}
    values["bias_correction"] = bool(bias_correction)
    done = direct_updates.update("adam", optimizer_id, step, params, grads, states, **values)
    if stale_params:
        for stale, param in zip(stale_params, params, strict=True):
            stale.copy_(param)
    return done
