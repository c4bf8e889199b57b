"""DeepSpeedCPUAdam: Adam on the host, for offloaded training."""

from __future__ import annotations

import functools
import itertools
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam
from deepspeed.ops.multi_tensor import refuse


class DeepSpeedCPUAdam(MultiTensorAdam):
    """Adam (`adamw_mode=False`) or AdamW in host memory, with fp32, bf16 or fp16 parameters and gradients.

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
        self.opt_id = next(DeepSpeedCPUAdam._ids)

    @property
    def fp32_optimizer_states(self) -> bool:
        """True: the moments are fp32, regardless of the parameters' dtype."""
        return self.defaults["fp32_optimizer_states"]

    @functools.cached_property
    def ds_opt_adam(self) -> ModuleType:
        """Module of the op's functions, with an optimizer created under ``opt_id``, for custom updates."""
        group = self.defaults
        beta1, beta2 = group["betas"]
        decay, decoupled = group["weight_decay"], group["adamw_mode"]
        create_adam(self.opt_id, group["lr"], beta1, beta2, group["eps"], decay, decoupled)
        return sys.modules[__name__]


# The op's documented functions, for callers without an optimizer object.

_made: dict[int, DeepSpeedCPUAdam] = {}
"""Optimizers by the callers' ids. An optimizer is given the state for one call only."""


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
    """Create AdamW or (``adamw_mode=False``) Adam under ``optimizer_id``; ``adam_update`` sets the other values."""
    made = DeepSpeedCPUAdam(
        [torch.empty(0)], alpha, True, (betta1, betta2), eps, weight_decay, False, adamw_mode
    )
    _made[optimizer_id] = made
    return 0


def destroy_adam(optimizer_id: int) -> int:
    """Delete the optimizer, if it exists. Returns 0."""
    _made.pop(optimizer_id, None)
    return 0


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
    """Apply update number ``step`` (from 1) to ``params`` and both moments, in place. Returns 0.

    Raises:
        ValueError: there is no optimizer of this id.
    """
    optimizer = _made.get(optimizer_id)
    if optimizer is None:
        raise ValueError(f"adam_update: there is no optimizer {optimizer_id}; call create_adam first")
    values = {"lr": lr, "betas": (beta1, beta2), "eps": epsilon, "weight_decay": weight_decay}
    group = optimizer.param_groups[0]
    group.update(values, bias_correction=bool(bias_correction))
    step_before = torch.tensor(float(step - 1))
    optimizer.state[params] = {"step": step_before, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    try:
        with torch.no_grad():
            optimizer.multi_tensor_step(group, [params], [grads])
        torch.autograd.graph.increment_version(params)
    finally:
        optimizer.state.clear()
        optimizer.forget_tables()
    return 0
