"""FusedLion: Lion on whatever device holds the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import direct_updates
from deepspeed.ops.fused import FusedOptimizer
from deepspeed.ops.lion.multi_tensor_lion import MultiTensorLion


class FusedLion(FusedOptimizer, MultiTensorLion):
    """Lion, one kernel per group of tensors."""

    documented_name = "FusedLion"

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


def multi_tensor_lion(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    step: int,
    weight_decay: float,
) -> None:
    """The documented function of the op: update number ``step`` (from 1) of the lists gradients, parameters and
    momenta, in place. ``chunk_size`` and ``noop_flag`` change nothing."""
    grads, params, exp_avgs = tensor_lists
    made = FusedLion([torch.empty(0)], lr, (beta1, beta2), weight_decay)
    direct_updates.apply(made, step, params, grads, {"exp_avg": exp_avgs})
