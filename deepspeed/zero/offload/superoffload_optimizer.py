"""The optimizer that the engine returns at stage 3 with ``offload_optimizer.super_offload``."""

from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer_Stage3


class SuperOffloadOptimizer_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """A ``DeepSpeedZeroOptimizer_Stage3`` most of whose step has happened when ``step`` is called."""
