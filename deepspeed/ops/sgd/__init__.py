"""Stochastic gradient descent."""

from __future__ import annotations

from deepspeed.ops.sgd.sgd import SGD

__all__ = ["SGD"]
