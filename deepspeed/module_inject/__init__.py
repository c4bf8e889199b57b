"""Documented classes of tensor parallelism; the mechanism is in ``deepspeed/runtime/tensor_parallel``."""

from __future__ import annotations

from .autotp_config import AutoTPConfig, AutoTPPresets, PartitionType, TPLayerSpec, merge_autotp_configs
from .layers import LinearAllreduce, LinearLayer

__all__ = [
    "AutoTPConfig",
    "AutoTPPresets",
    "LinearAllreduce",
    "LinearLayer",
    "PartitionType",
    "TPLayerSpec",
    "merge_autotp_configs",
]
