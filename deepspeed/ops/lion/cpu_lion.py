"""DeepSpeedCPULion: host Lion for offloaded training."""

from __future__ import annotations

from typing import Any

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
