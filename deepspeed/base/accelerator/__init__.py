"""The device that everything runs on, as one object: ``get_accelerator()``."""

from deepspeed.base.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.base.accelerator.select import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
    synchronize_stream,
    take_device_of_rank,
)

__all__ = [
    "DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator",
    "synchronize_stream", "take_device_of_rank",
]  # fmt: skip
