"""The optimizer that the engine returns at stage 3 with ``offload_optimizer.super_offload``."""

from __future__ import annotations

from deepspeed.zero.norms import clip_coefficient
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer_Stage3


class SuperOffloadOptimizer_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """A ``DeepSpeedZeroOptimizer_Stage3`` most of whose step has happened when ``step`` is called."""

    def check_clip_grads(self, total_norm: float) -> bool:
        """Return whether gradients of this norm (before clipping) are clipped, so that updates made ahead are
        discarded.
        """
        return clip_coefficient(float(total_norm), self.clip_grad) != 1.0
