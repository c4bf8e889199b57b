"""Static and dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2)."""

from __future__ import annotations

from typing import Any

from deepspeed.config.plan import LossScalePlan


class LossScaleError(RuntimeError):
    """The scale cannot fall further, or too many steps in a row were skipped."""


class LossScaler:
    """Keeps the factor that losses are multiplied by and adapts it after overflows.

    Dynamic: each overflow uses up one of ``hysteresis`` tolerated ones, after which the scale is halved; ``window``
    good steps in a row double it. ``consecutive_hysteresis`` restores the tolerance after every good step; otherwise
    it is restored when the scale grows.
    """

    def __init__(self, plan: LossScalePlan) -> None:
        self.plan = plan
        self.scale = plan.static if plan.static is not None else plan.initial
        self.tolerance_left = plan.hysteresis
        self.good_steps = 0

    @property
    def dynamic(self) -> bool:
        return self.plan.static is None

    def update(self, overflow: bool) -> None:
        """Account for one optimizer step. Raises LossScaleError on an overflow at the minimum scale."""
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
            return
        if self.plan.consecutive_hysteresis:
            self.tolerance_left = self.plan.hysteresis
        self.good_steps += 1
        if self.good_steps % self.plan.window == 0:
            if not self.plan.consecutive_hysteresis:
                self.tolerance_left = self.plan.hysteresis
            self.scale *= 2.0

    def _shrink(self) -> None:
        self.good_steps = 0
        if self.tolerance_left > 1:
            self.tolerance_left -= 1
            return
        if self.scale <= self.plan.minimum:
            raise LossScaleError(
                f"gradients overflow although the fp16 loss scale is already at its minimum, {self.plan.minimum:g} "
                "(fp16.min_loss_scale). The model itself produces Inf or NaN: use bf16, lower the learning rate, "
                "or look at the parameter named above."
            )
        self.scale = max(self.scale / 2.0, self.plan.minimum)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "tolerance_left": self.tolerance_left, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.tolerance_left = int(state["tolerance_left"])
        self.good_steps = int(state["good_steps"])
