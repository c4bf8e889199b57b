"""Adagrad."""

from deepspeed.ops.adagrad.cpu_adagrad import Adagrad, DeepSpeedCPUAdagrad

__all__ = ["Adagrad", "DeepSpeedCPUAdagrad"]
