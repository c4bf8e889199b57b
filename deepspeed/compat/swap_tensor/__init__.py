"""Documented path of helpers for swapping tensors to files; the engine's own are in ``zero/offload``."""

from deepspeed.compat.swap_tensor.utils import AIO_ALIGNED_BYTES, MIN_AIO_BYTES, MIN_SWAPPABLE_BYTES

__all__ = ["AIO_ALIGNED_BYTES", "MIN_AIO_BYTES", "MIN_SWAPPABLE_BYTES"]
