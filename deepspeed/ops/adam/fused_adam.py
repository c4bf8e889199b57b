"""FusedAdam: Adam/AdamW on whatever device holds the parameters."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam, adam_defaults
from deepspeed.ops.fused import FusedOptimizer
from deepspeed.ops.multi_tensor import refuse


class FusedAdam(FusedOptimizer, MultiTensorAdam):
    """Adam with decoupled weight decay (`adam_w_mode=True`, AdamW) or with L2 regularisation.

    One kernel per group of tensors: the native library on CPUs, Triton on GPUs, else PyTorch, all with the same
    arithmetic. `amsgrad` is in the signature but not available.
    """

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
        super().__init__(params, adam_defaults(lr, bias_correction, betas, eps, weight_decay, adam_w_mode))
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = set_grad_none
