"""A writer that only counts bytes, to see what serialization alone costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.ops.io.base_file_writer import BaseFileWriter, as_bytes


class MockFileWriter(BaseFileWriter):
    """Writes nothing; `num_bytes` and `num_writes` say what would have been written."""

    def __init__(self, file_path: str) -> None:
        super().__init__(file_path)
        self.num_bytes = 0
        self.num_writes = 0

    def write(self, buffer: Any) -> int:
        nbytes = as_bytes(buffer).numel()
        self.num_bytes += nbytes
        self.num_writes += 1
        return nbytes

    def save_torch_storage_object_list(self, storage_obj_list: Iterable[Any], save_size: bool) -> int:
        """Counts the storages, each with the 8 bytes of its size if `save_size`; returns the number of bytes."""
        return sum(self.write(storage) + 8 * bool(save_size) for storage in storage_obj_list)
