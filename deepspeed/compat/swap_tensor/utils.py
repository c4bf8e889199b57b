"""Documented helpers for swapping tensors to files with an aio handle (``deepspeed.ops.aio``)."""

MIN_AIO_BYTES = 1024**2
"""Smallest access that storage serves at its full speed."""
AIO_ALIGNED_BYTES = 1024
MIN_SWAPPABLE_BYTES = MIN_AIO_BYTES
"""Smaller tensors are not worth a file of their own."""
