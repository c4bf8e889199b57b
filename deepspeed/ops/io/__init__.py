"""File-like objects for `torch.save` that write through `aio_handle`, plainly, or not at all."""

from deepspeed.ops.io.base_file_writer import MockFileWriter, PyFileWriter
from deepspeed.ops.io.fast_file_writer import FastFileWriter, FastFileWriterConfig

__all__ = ["FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]
