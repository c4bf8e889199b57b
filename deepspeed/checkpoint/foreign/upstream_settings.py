"""Settings of a run's configuration that determine the layout of release 0.19.8's checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.checkpoint import names
from deepspeed.checkpoint.catalog import Catalog
from deepspeed.checkpoint.files.safe_types import DynamicLossScaler, LossScaler
from deepspeed.checkpoint.reader import materialize

SUB_GROUP_NUMEL = 10**9
"""Default of ``zero_optimization.sub_group_size``, which splits the state of stage 3."""


class UpstreamSettings:
    """Settings for an export; ``raw`` is the saved configuration with the export's ``stage``."""

    def __init__(self, catalog: Catalog, stage: int) -> None:
        self.raw = dict(materialize(catalog.model_states.get(names.DS_CONFIG) or {}))
        self.raw["zero_optimization"] = {**self._section("zero_optimization"), "stage": stage}
        self.bf16 = bool(self._section("bf16").get("enabled"))
        self.fp16 = bool(self._section("fp16").get("enabled"))
        self.clipping = float(_known(self.raw.get("gradient_clipping"), 0.0))
        zero = self._section("zero_optimization")
        self.round_robin = stage == 2 and bool(zero.get("round_robin_gradients"))
        self.sub_group_numel = int(_known(zero.get("sub_group_size"), SUB_GROUP_NUMEL))
        accumulates_in = self._section("data_types").get("grad_accum_dtype")
        self.bf16_optimizer = stage == 1 and self.bf16 and accumulates_in == "fp32"

    def _section(self, name: str) -> dict[str, Any]:
        return self.raw.get(name) or {}

    def loss_scaler(self, catalog: Catalog) -> LossScaler:
        """Return the loss scale as an object with that release's attributes."""
        saved = catalog.scalars.get("loss_scaler") or {}
        settings = self._section("fp16")
        scale = float(saved.get("scale", 1.0)) if self.fp16 else 1.0
        if not self.fp16 or _known(settings.get("loss_scale"), 0):
            return with_attributes(LossScaler(), cur_scale=scale, dynamic=False)
        good_steps = int(saved.get("good_steps", 0))
        steps = max(int(catalog.model_states["global_steps"]), good_steps)
        hysteresis = int(_known(settings.get("hysteresis"), 2))
        return with_attributes(
            DynamicLossScaler(),
            cur_scale=scale,
            dynamic=True,
            cur_iter=steps,
            last_overflow_iter=steps - good_steps - 1,
            scale_factor=2.0,
            scale_window=int(_known(settings.get("loss_scale_window"), 1000)),
            min_scale=_known(settings.get("min_loss_scale"), 1),
            delayed_shift=hysteresis,
            cur_hysteresis=int(saved.get("tolerance_left", hysteresis)),
            consecutive_hysteresis=bool(settings.get("consecutive_hysteresis", False)),
            raise_error_at_min_scale=True,
            dtype=torch.float16,
        )


def with_attributes(plain: Any, **attributes: Any) -> Any:
    vars(plain).update(attributes)
    return plain


def _known(value: Any, default: Any) -> Any:
    """Return ``value``, or ``default`` if it is omitted or "auto"."""
    return default if value is None or value == "auto" else value
