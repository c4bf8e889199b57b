"""Constants of file writers of release 0.19: the keys of what their statistics were called there."""

from __future__ import annotations

INVALID_FD = -1
STORAGE_OBJ_SIZE = 8
"""Bytes that torch writes before a storage: the number of its elements."""

FILE_PATH_KEY = "path"
RANK_KEY = "rank"

WRITE_COUNT_KEY = "write"
FLUSH_COUNT_KEY = "flush"
CLOSE_COUNT_KEY = "close"
FILENO_COUNT_KEY = "fileno"

WRITE_BYTES_KEY = "bytes"
WRITE_SEC_KEY = "write_secs"
WRITE_SPEED_KEY = "write_GB/s"

AIO_WRITE_BYTES_KEY = "aio_bytes"
AIO_WRITE_SEC_KEY = "aio_write_secs"
AIO_SPEED_KEY = "aio_GB/s"
AIO_FILL_BUFFER_COUNT_KEY = "fill_buffer_count"
AIO_FILL_BUFFER_SEC_KEY = "fill_buffer_secs"
AIO_FILL_BUFFER_SPEED_KEY = "fill_buffer_GB/s"
SLOW_WRITE_BYTES_KEY = "slow_bytes"
SLOW_WRITE_SEC_KEY = "slow_write_secs"

SAVE_STORAGE_KEY = "save_storage"
SAVE_STORAGE_BYTES_KEY = f"{SAVE_STORAGE_KEY}_bytes"
SAVE_STORAGE_SEC_KEY = f"{SAVE_STORAGE_KEY}_secs"
