"""FusedLion: Lion on whatever device holds the parameters."""

from __future__ import annotations

from typing import Any

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
