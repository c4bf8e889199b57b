"""Documented classes of tensor parallelism, which is implemented in ``deepspeed/parallel/tensor``."""

from deepspeed.compat.module_inject.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.planning.autotp_config import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)

__all__ = [
    "AutoTPConfig", "AutoTPPresets", "LinearAllreduce", "LinearLayer", "PartitionType", "TPLayerSpec",
    "merge_autotp_configs",
]  # fmt: skip
