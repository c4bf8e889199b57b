"""Documented loss scalers, for code that scales its losses itself; built on ``optim/loss_scaler.py``, which engines
configure from the ``fp16`` section."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from deepspeed.compat.runtime_utils import has_non_finite
from deepspeed.config.plan import LossScalePlan
from deepspeed.optim import loss_scaler as core
from deepspeed.optim.loss_scaler import LossScalerBase

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScaler(LossScalerBase):
    """A static scale: overflows are never reported."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        return False


class DynamicLossScaler(core.LossScaler):
    """A dynamic scale: shrinks after overflows and grows again.

    ``delayed_shift``: number of overflows before it shrinks (``hysteresis`` in a config). ``dtype`` is unused.
    ``raise_error_at_min_scale=False``: stay at ``min_scale`` instead of raising LossScaleError.
    """

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype
        super().__init__(
            LossScalePlan(
                static=None,
                initial=float(init_scale),
                window=int(scale_window),
                hysteresis=int(delayed_shift),
                consecutive_hysteresis=bool(consecutive_hysteresis),
                minimum=float(min_scale),
                stops_at_minimum=raise_error_at_min_scale,
            )
        )

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Return whether any gradient on this rank is not finite."""
        return any(param.grad is not None and has_non_finite(param.grad) for param in params)

    has_overflow = has_overflow_serial


class LossScaleProfile(str, Enum):
    """Selects the defaults of a dynamic scale: those of ``FP16_Optimizer`` or of ``FP16_UnfusedOptimizer``."""

    FUSED = "fused"
    UNFUSED = "unfused"


class LossScaleConfig(core.LossScaler):
    """The loss scaler for mixed precision in ``low_precision_dtype``: scale 1 unless that is fp16.

    ``dynamic_loss_args``: arguments from the ``fp16`` section (``DeepSpeedFP16Config.dynamic_loss_scale_args``);
    None: start at ``initial_dynamic_scale`` (None: that of ``profile``). ValueError: an invalid value.
    """

    def __init__(
        self,
        low_precision_dtype: torch.dtype,
        dynamic_loss_scale: bool,
        static_loss_scale: float,
        dynamic_loss_args: Mapping[str, Any] | None,
        *,
        profile: LossScaleProfile = LossScaleProfile.FUSED,
        initial_dynamic_scale: float | None = None,
    ) -> None:
        self.use_grad_scaling = low_precision_dtype is torch.float16
        if not self.use_grad_scaling:
            plan = LossScalePlan()
        elif not dynamic_loss_scale:
            plan = LossScalePlan(static=_finite(static_loss_scale, "fp16.loss_scale"))
        else:
            start, minimum = (2.0**32, 1.0) if profile == LossScaleProfile.FUSED else (2.0**16, 0.25)
            start = start if initial_dynamic_scale is None else initial_dynamic_scale
            given = {INITIAL_LOSS_SCALE: start, SCALE_WINDOW: 1000, MIN_LOSS_SCALE: minimum}
            plan = _dynamic_plan(given if dynamic_loss_args is None else dynamic_loss_args)
        super().__init__(plan)


def _dynamic_plan(args: Mapping[str, Any]) -> LossScalePlan:
    known = {INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT, CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE}
    missing = {INITIAL_LOSS_SCALE, SCALE_WINDOW, MIN_LOSS_SCALE} - args.keys()
    if missing or args.keys() - known:
        raise ValueError(f"dynamic_loss_args has the keys {sorted(args)}; expected {sorted(known)}")
    return LossScalePlan(
        static=None,
        initial=_finite(args[INITIAL_LOSS_SCALE], f"dynamic_loss_args[{INITIAL_LOSS_SCALE!r}]"),
        window=_count(args[SCALE_WINDOW], f"dynamic_loss_args[{SCALE_WINDOW!r}]"),
        hysteresis=_count(args.get(DELAYED_SHIFT, 1), f"dynamic_loss_args[{DELAYED_SHIFT!r}]"),
        consecutive_hysteresis=bool(args.get(CONSECUTIVE_HYSTERESIS, False)),
        minimum=_finite(args[MIN_LOSS_SCALE], f"dynamic_loss_args[{MIN_LOSS_SCALE!r}]"),
        stops_at_minimum=False,
    )


def _finite(value: Any, name: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value!r}")
    if number <= 0:
        raise ValueError(f"{name} must be greater than 0, not {value!r}")
    return number


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return int(value)


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScaler | DynamicLossScaler:
    """Return the scaler for gradients in ``dtype``: scale 1 unless that is fp16."""
    if dtype is not torch.half:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(_finite(static_loss_scale, "fp16.loss_scale"))
    if dynamic_loss_args is None:
        raise ValueError(
            "dynamic_loss_args is None: dynamic scaling needs init_scale, scale_window and min_scale"
        )
    plan = _dynamic_plan(dynamic_loss_args)
    return DynamicLossScaler(
        plan.initial, plan.window, plan.minimum, plan.hysteresis, plan.consecutive_hysteresis, dtype=dtype
    )
