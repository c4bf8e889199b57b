"""Direct I/O between files and GPU memory."""

from deepspeed.ops.op_builder import GDSBuilder

__all__ = ["GDSBuilder"]
