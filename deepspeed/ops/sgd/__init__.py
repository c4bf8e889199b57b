"""Stochastic gradient descent."""

from deepspeed.ops.sgd.sgd import SGD

__all__ = ["SGD"]
