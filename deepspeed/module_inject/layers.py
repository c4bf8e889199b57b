"""Documented path of the parallel layers."""

from __future__ import annotations

from deepspeed.runtime.tensor_parallel.config import AUTOTP_MODE
from deepspeed.runtime.tensor_parallel.fused_layers import SubParamLinearAllreduce, SubParamLinearLayer
from deepspeed.runtime.tensor_parallel.layers import LinearAllreduce, LinearLayer

__all__ = [
    "LinearAllreduce",
    "LinearLayer",
    "SubParamLinearAllreduce",
    "SubParamLinearLayer",
    "get_auto_tp_mode",
    "is_autotp_training_mode",
    "set_autotp_mode",
]


def set_autotp_mode(training: bool = False) -> None:
    """Nothing: layers have gradients wherever autograd records, and none under ``torch.no_grad``."""


def get_auto_tp_mode() -> AUTOTP_MODE:
    """TRAINING: layers can always be trained."""
    return AUTOTP_MODE.TRAINING


def is_autotp_training_mode() -> bool:
    return True
