"""The compressed all-reduce by its name for HCCL."""

from __future__ import annotations

from deepspeed.compat.runtime_comm.compressed import CompressedBackend


class HcclBackend(CompressedBackend):
    """``CompressedBackend``; the process group decides what moves the bytes."""
