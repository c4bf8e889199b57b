"""Documented helpers for swapping tensors to files with an aio handle (``deepspeed.ops.aio``)."""

MIN_AIO_BYTES = 1024**2
"""Smallest access at which storage reaches full bandwidth, in bytes."""
AIO_ALIGNED_BYTES = 1024
MIN_SWAPPABLE_BYTES = MIN_AIO_BYTES
"""Smallest tensor worth a separate file, in bytes."""
