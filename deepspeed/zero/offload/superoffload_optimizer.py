"""Optimizer that the engine returns at stage 3 with ``offload_optimizer.super_offload``."""

from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer_Stage3


class SuperOffloadOptimizer_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """A ``DeepSpeedZeroOptimizer_Stage3`` that runs most of the update speculatively before ``step``."""
