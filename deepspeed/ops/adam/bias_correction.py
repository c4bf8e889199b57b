"""Bias corrections of Adam, in fp64; the kernels round them once."""

from __future__ import annotations

import math

from deepspeed.ops.update import Group


def corrections(group: Group, step: int) -> tuple[float, float]:
    """Step size lr / (1 - beta1^t) and factor 1 / sqrt(1 - beta2^t) of the square root."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    if not group["bias_correction"]:
        return lr, 1.0
    return lr / (1.0 - math.pow(beta1, step)), 1.0 / math.sqrt(1.0 - math.pow(beta2, step))
