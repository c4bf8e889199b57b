"""``FP16_Optimizer`` and ``FP16_UnfusedOptimizer``, for training loops without an engine."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.base.logging import logger
from deepspeed.compat.fp16.loss_scaler import LossScaleConfig, LossScaleProfile
from deepspeed.optim import loss_scaler as core
from deepspeed.zero.optimizer import DeepSpeedOptimizer, FusedMasters, UnfusedMasters
from deepspeed.zero.tensor_norms import norm_of_gradients

# A torch optimizer over fp32 master copies of 16-bit weights.

PARAMS = "params"


class MasterCopies(DeepSpeedOptimizer):
    """Wraps ``optimizer``, whose groups then hold fp32 master copies of their parameters.

    Gradients arrive in ``param.grad`` of the model's parameters, scaled by the loss scale and summed over ranks.
    ``step`` unscales and clips them, updates the copies and rounds them into the model. An overflow skips the step and
    lowers a dynamic scale. ``mpu``: the norm is taken over its model-parallel ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scale: core.LossScaler | None,
        mpu: Any,
        clip_grad: float,
        low_precision_dtype: torch.dtype,
        *settings: Any,
        **defaults: Any,
    ) -> None:
        scale = scale or LossScaleConfig(low_precision_dtype, *settings, **defaults)
        self.optimizer = optimizer
        self.low_precision_dtype = low_precision_dtype
        self.loss_scale_config = scale
        self.mpu = mpu
        self.clip_grad = clip_grad
        self.overflow = False
        self._global_grad_norm = 0.0
        self._grad_scale = scale.scale
        self.fp16_groups: list[list[Tensor]] = [list(group[PARAMS]) for group in self.param_groups]
        self.fp32_groups = [[_master(param) for param in group] for group in self.fp16_groups]
        for group, masters in zip(self.param_groups, self.fp32_groups, strict=True):
            group[PARAMS] = masters

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter of the model, its master copy)."""
        for group, masters in zip(self.fp16_groups, self.fp32_groups, strict=True):
            yield from zip(group, masters, strict=True)

    # One step -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False) -> None:
        """Backpropagate the loss times the loss scale."""
        scaled = loss.float() * self.loss_scale_config.scale
        scaled.backward(create_graph=create_graph, retain_graph=retain_graph)

    def step(self, closure: None = None) -> bool:
        """Update the weights. Returns whether the step was skipped because of an overflow."""
        if closure is not None:
            raise ValueError("closure is not supported: call backward() and step()")
        scale = self.loss_scale_config.scale
        norm = norm_of_gradients([param for param, _ in self._pairs()], self.mpu)
        self.overflow = not math.isfinite(norm)
        self._update_scale(self.overflow)
        if self.overflow:
            self.zero_grad()
            return True
        self._global_grad_norm = norm / scale
        for param, master in self._pairs():
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
        self._grad_scale = scale
        self._unscale_and_clip(norm)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in self._pairs():
                master.grad = None
                param.grad = None
                if master is not param:
                    param.copy_(master)
        return False

    def _update_scale(self, overflow: bool) -> None:
        if overflow:
            logger.warning(
                f"step skipped: a gradient is not finite at loss scale {self.loss_scale_config.scale:g}"
            )
        self.loss_scale_config.update(overflow)

    def _unscale_and_clip(self, total_norm: float, apply_scale: bool = True) -> float:
        """Divide the copies' gradients, whose norm is ``total_norm``, by the loss scale and the clipping factor.
        Returns the divisor; ``apply_scale=False`` only computes it."""
        divisor = self._grad_scale
        if self.clip_grad > 0:
            divisor *= max(1.0, (total_norm / self._grad_scale + 1e-6) / self.clip_grad)
        if apply_scale and divisor != 1.0:
            for _, master in self._pairs():
                if master.grad is not None:
                    # not in place: an fp32 parameter is its own copy, and its gradient belongs to the caller
                    master.grad = master.grad / divisor
        return divisor

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param, _ in self._pairs():
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.zero_()

    # State --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss_scaler": self.loss_scale_config.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": [[master.detach().clone() for master in group] for group in self.fp32_groups],
            "clip_grad": self.clip_grad,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """Load the state. ``load_optimizer_states=False``: only the weights, the loss scale and the clipping."""
        self.loss_scale_config.load_state_dict(state_dict["loss_scaler"])
        self.clip_grad = state_dict["clip_grad"]
        if load_optimizer_states:
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        with torch.no_grad():
            for group, saved in zip(self.fp32_groups, state_dict["fp32_groups"], strict=True):
                for master, value in zip(group, saved, strict=True):
                    master.copy_(value)
            for param, master in self._pairs():
                param.copy_(master)

    def refresh_fp32_params(self) -> None:
        """Set the copies to the model's weights, after these were loaded or edited."""
        with torch.no_grad():
            for param, master in self._pairs():
                master.copy_(param)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    state = property(attrgetter("optimizer.state"))
    loss_scale = property(attrgetter("loss_scale_config.scale"))

    cur_scale = loss_scale

    dynamic_loss_scale = property(attrgetter("loss_scale_config.dynamic"))

    def override_loss_scale(self, loss_scale: float) -> None:
        """Set the current loss scale. ValueError: not finite or not above 0."""
        if not math.isfinite(loss_scale) or loss_scale <= 0:
            raise ValueError(f"loss_scale must be finite and greater than 0, not {loss_scale!r}")
        self.loss_scale_config.scale = float(loss_scale)

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        return self.param_groups[0]["lr"]


def _master(param: Tensor) -> Tensor:
    return (
        param if param.dtype == torch.float32 else nn.Parameter(param.detach().float(), param.requires_grad)
    )


class FP16_UnfusedOptimizer(MasterCopies, abc.ABC):
    """Master copies are individual tensors. The scaler is ``loss_scale_config``, or built from ``low_precision_dtype``,
    ``static_loss_scale``, ``dynamic_loss_scale`` and ``dynamic_loss_args``. ``deepspeed``, ``verbose``,
    ``fused_lamb_legacy`` and ``has_moe_layers`` have no effect.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        deepspeed: Any = None,
        loss_scale_config: core.LossScaler | None = None,
        low_precision_dtype: torch.dtype = torch.float16,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
        mpu: Any = None,
        clip_grad: float = 0.0,
        fused_lamb_legacy: bool = False,
        has_moe_layers: bool = False,
    ) -> None:
        settings = low_precision_dtype, dynamic_loss_scale, static_loss_scale, dynamic_loss_args
        profile = LossScaleProfile.UNFUSED
        super().__init__(init_optimizer, loss_scale_config, mpu, clip_grad, *settings, profile=profile)
        self.fused_lamb_legacy = fused_lamb_legacy

    def _unscale_and_clip(self, total_norm: float, apply_scale: bool = True) -> float:
        return self.unscale_and_clip_grads(total_norm, apply_scale)  # a subclass may replace it

    unscale_and_clip_grads = MasterCopies._unscale_and_clip
    step_fused_lamb = MasterCopies.step


FP16_UnfusedOptimizer.register(UnfusedMasters)


class FP16_Optimizer(MasterCopies, abc.ABC):
    """Also the type of an engine's fp16 optimizer, for ``isinstance``. The scaler is ``loss_scale_config``, or built
    from ``low_precision_dtype``, ``static_loss_scale``, ``dynamic_loss_scale``, ``initial_dynamic_scale`` and
    ``dynamic_loss_args``. ``deepspeed``, ``verbose``, ``has_moe_layers`` and ``timers`` have no effect.

    ValueError: ``fused_adam_legacy``, which passes arguments to ``step`` that torch's optimizers do not take.
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
        settings = low_precision_dtype, dynamic_loss_scale, static_loss_scale, dynamic_loss_args
        defaults = {"initial_dynamic_scale": initial_dynamic_scale}
        super().__init__(init_optimizer, loss_scale_config, mpu, clip_grad, *settings, **defaults)

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """Return copies of the fp32 weights, one flat tensor per group."""
        return [_flat(group) for group in self.fp32_groups]

    def unscale_and_clip_grads(
        self, grad_groups_flat: Sequence[Tensor], total_norm: float, apply_scale: bool = True
    ) -> float:
        """Divide ``grad_groups_flat``, whose norm is ``total_norm``, by the loss scale and the clipping factor. Returns
        the divisor; ``apply_scale=False`` only computes it."""
        divisor = self._unscale_and_clip(total_norm, apply_scale=False)
        if apply_scale and divisor != 1.0:
            for grads in grad_groups_flat:
                grads.div_(divisor)
        return divisor

    step_fused_adam = MasterCopies.step


FP16_Optimizer.register(FusedMasters)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
