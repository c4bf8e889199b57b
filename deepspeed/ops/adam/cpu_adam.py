"""DeepSpeedCPUAdam: host Adam for offloaded training."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam
from deepspeed.ops.multi_tensor import refuse


class DeepSpeedCPUAdam(MultiTensorAdam):
    """Adam (`adamw_mode=False`) or AdamW on host memory, fp32, bf16 or fp16 parameters and gradients.

    `fp32_optimizer_states=False` keeps the moments in the parameter's dtype, which halves their memory for
    16-bit parameters. `amsgrad` is in the signature but not available.
    """

    decoupled_key = "adamw_mode"

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
