"""``FP16_Optimizer``: as ``FP16_UnfusedOptimizer``, for optimizers that update all of a group at once."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.compat.fp16.loss_scaler import LossScaleConfig
from deepspeed.compat.fp16.unfused_optimizer import MasterCopies
from deepspeed.optim import loss_scaler as core
from deepspeed.zero.optimizer import FusedMasters


class FP16_Optimizer(MasterCopies, abc.ABC):
    """An engine's are instances, too. The scale is ``loss_scale_config``, or made of ``low_precision_dtype``,
    ``static_loss_scale``, ``dynamic_loss_scale``, ``initial_dynamic_scale`` and ``dynamic_loss_args``. ``deepspeed``,
    ``verbose``, ``has_moe_layers`` and ``timers`` have no effect.

    ValueError: ``fused_adam_legacy``, for steps with arguments that torch's optimizers do not have.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        deepspeed: Any = None,
        loss_scale_config: core.LossScaler | None = None,
        low_precision_dtype: torch.dtype = torch.float16,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        initial_dynamic_scale: float = 2**32,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
        mpu: Any = None,
        clip_grad: float = 0.0,
        fused_adam_legacy: bool = False,
        has_moe_layers: bool = False,
        timers: Any = None,
    ) -> None:
        if fused_adam_legacy:
            raise ValueError(
                "fused_adam_legacy=True: pass an optimizer whose step() needs no gradients as arguments"
            )
        scale = loss_scale_config or LossScaleConfig(
            low_precision_dtype,
            dynamic_loss_scale,
            static_loss_scale,
            dynamic_loss_args,
            initial_dynamic_scale=initial_dynamic_scale,
        )
        super().__init__(init_optimizer, scale, low_precision_dtype, mpu, clip_grad)

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The fp32 weights, one flat tensor per group (copies)."""
        return [_flat(group) for group in self.fp32_groups]

    def unscale_and_clip_grads(
        self, grad_groups_flat: Sequence[Tensor], total_norm: float, apply_scale: bool = True
    ) -> float:
        """Divide ``grad_groups_flat``, of which ``total_norm`` is the norm, by the loss scale and by what clipping asks
        for. Returns the divisor; ``apply_scale=False`` only computes it."""
        divisor = self._unscale_and_clip(total_norm, apply_scale=False)
        if apply_scale and divisor != 1.0:
            for grads in grad_groups_flat:
                grads.div_(divisor)
        return divisor

    step_fused_adam = MasterCopies.step


FP16_Optimizer.register(FusedMasters)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
