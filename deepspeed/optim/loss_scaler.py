"""Static and dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2)."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor

from deepspeed.base.exceptions import ExplainedError
from deepspeed.config.plan import LossScalePlan


class LossScaleError(ExplainedError, RuntimeError):
    """The loss scale cannot fall further, or too many consecutive steps were skipped."""


class LossScalerBase:
    """A constant loss scale, the factor that losses are multiplied by."""

    def __init__(self, cur_scale: float) -> None:
        self.scale = cur_scale

    @property
    def dynamic(self) -> bool:
        return False

    @property
    def cur_scale(self) -> float:
        return self.scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.scale = float(value)

    @property
    def loss_scale(self) -> float:
        return self.scale

    def update_scale(self, overflow: bool) -> None:
        """Account for one optimizer step."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: Any) -> tuple[Tensor, ...]:
        """Scale a module's input gradients, as a backward hook."""
        return tuple(grad * self.scale for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """The loss scale of an fp16 run, adapted after overflows if dynamic.

    Dynamic: the first ``hysteresis`` - 1 overflows are tolerated, and each one after them halves the scale. The scale
    doubles at the first good step after ``window`` consecutive good ones, and again every ``window`` steps, as in
    release 0.19: a resumed run grows its scale at the same step in both. ``consecutive_hysteresis`` restores the
    tolerance after every good step; otherwise it is restored when the scale grows.
    """

    scale_factor = 2.0

    def __init__(self, plan: LossScalePlan) -> None:
        self.plan = plan
        super().__init__(plan.static if plan.static is not None else plan.initial)
        self.tolerance_left = plan.hysteresis
        self.good_steps = 0
        """Consecutive good steps."""
        self.cur_iter = 0
        """Number of steps, including skipped ones."""

    @property
    def dynamic(self) -> bool:
        return self.plan.static is None

    @property
    def exhausted(self) -> bool:
        """Return whether another overflow would change nothing, since the scale cannot fall further."""
        return not self.dynamic or (self.tolerance_left <= 1 and self.scale <= self.plan.minimum)

    def update(self, overflow: bool) -> None:
        """Account for one optimizer step. LossScaleError: an overflow at the minimum scale, if the plan stops
        training there."""
        self.cur_iter += 1
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
            return
        if self.plan.consecutive_hysteresis:
            self.tolerance_left = self.plan.hysteresis
        if self.good_steps and self.good_steps % self.plan.window == 0:
            if not self.plan.consecutive_hysteresis:
                self.tolerance_left = self.plan.hysteresis
            self.scale *= self.scale_factor
        self.good_steps += 1

    def _shrink(self) -> None:
        self.good_steps = 0
        if self.tolerance_left > 1:
            self.tolerance_left -= 1
            return
        if self.scale <= self.plan.minimum and self.plan.stops_at_minimum:
            raise LossScaleError(
                "gradients overflow although the fp16 loss scale is already at its minimum, "
                f"{self.plan.minimum:g} (fp16.min_loss_scale). The model itself produces Inf or NaN: use "
                "bf16, lower the learning rate, or check the parameter named above."
            )
        self.scale = max(self.scale / self.scale_factor, self.plan.minimum)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "tolerance_left": self.tolerance_left, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.tolerance_left = int(state["tolerance_left"])
        self.good_steps = int(state["good_steps"])
        self.cur_iter = max(self.cur_iter, self.good_steps)

    # ---- documented names of the same values, also in the ``loss_scale_config`` of optimizers

    dynamic_loss_scale = property(attrgetter("dynamic"))

    @property
    def last_overflow_iter(self) -> int:
        return self.cur_iter - self.good_steps - 1

    scale_window = property(attrgetter("plan.window"))
    min_scale = min_loss_scale = property(attrgetter("plan.minimum"))
    delayed_shift = property(attrgetter("plan.hysteresis"))
    consecutive_hysteresis = property(attrgetter("plan.consecutive_hysteresis"))

    @property
    def cur_hysteresis(self) -> int:
        return self.tolerance_left

    @cur_hysteresis.setter
    def cur_hysteresis(self, value: int) -> None:
        self.tolerance_left = int(value)

    def update_scale(self, overflow: bool) -> None:
        self.update(overflow)
