"""FusedAdam: Adam/AdamW on whatever device holds the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import direct_updates
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam
from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply
from deepspeed.ops.fused import FusedOptimizer
from deepspeed.ops.multi_tensor import refuse

multi_tensor_applier = MultiTensorApply(2048 * 32)
"""Of ``FusedAdamBuilder().load().multi_tensor_adam``, for steps of one's own."""


class FusedAdam(FusedOptimizer, MultiTensorAdam):
    """Adam with decoupled weight decay (`adam_w_mode=True`, AdamW) or with L2 regularisation.

    One kernel per group of tensors: the native host library on CPUs, Triton on GPUs, else PyTorch, all with
    the same arithmetic. `amsgrad` is in the signature but not available.
    """

    documented_name = "FusedAdam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse("FusedAdam", amsgrad=amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": bool(adam_w_mode),
        }
        super().__init__(params, defaults)
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = set_grad_none


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """The documented function of the op: update number ``step`` (from 1) of the lists gradients, parameters, first and
    second moments, in place. ``mode``: 0 Adam, 1 AdamW. ``chunk_size`` and ``noop_flag`` change nothing."""
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    made = FusedAdam(
        [torch.empty(0)], lr, bool(bias_correction), (beta1, beta2), epsilon, mode == 1, weight_decay
    )
    states = {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    direct_updates.apply(made, step, params, grads, states)
