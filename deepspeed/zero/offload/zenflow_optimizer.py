"""Optimizers that the engine returns at stages 1 and 2 with ``zero_optimization.zenflow``."""

from __future__ import annotations

from deepspeed.config.sections.zero import ZenFlowConfig
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer


class ZenFlowZeroOptimizer(DeepSpeedZeroOptimizer):
    """A ``DeepSpeedZeroOptimizer`` whose step updates the chosen columns."""

    @classmethod
    def create(cls, zenflow_config: ZenFlowConfig) -> type[ZenFlowZeroOptimizer]:
        """Return the class for this config: parallel with ``overlap_step``, else sequential."""
        return ZenFlowZeroOptimizerParallel if zenflow_config.overlap_step else ZenFlowZeroOptimizerSequential


class ZenFlowZeroOptimizerSequential(ZenFlowZeroOptimizer):
    """``overlap_step: false``: a round ends when the host has updated."""


class ZenFlowZeroOptimizerParallel(ZenFlowZeroOptimizer):
    """``overlap_step: true``: the host updates while the next round computes."""
