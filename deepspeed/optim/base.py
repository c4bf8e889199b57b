"""Marker classes that clients test optimizers against."""


class DeepSpeedOptimizer:
    """Base of every optimizer that the engine wraps around a client's."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """Base of optimizers whose state is sharded or kept in a higher precision."""
