"""File-like objects for `torch.save` that write through `aio_handle`, plainly, or not at all."""

from deepspeed.ops.io.fast_file_writer import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.io.mock_file_writer import MockFileWriter
from deepspeed.ops.io.py_file_writer import PyFileWriter

__all__ = ["FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]
