"""Adagrad."""

from __future__ import annotations

from deepspeed.ops.adagrad.cpu_adagrad import Adagrad, DeepSpeedCPUAdagrad

__all__ = ["Adagrad", "DeepSpeedCPUAdagrad"]
