"""The compressed all-reduce by its name for NCCL."""

from deepspeed.compat.runtime_comm.compressed import CompressedBackend


class NcclBackend(CompressedBackend):
    """``CompressedBackend``; the process group decides what moves the bytes."""
