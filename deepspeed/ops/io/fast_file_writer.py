"""A file-like object that writes through `aio_handle`: bytes are buffered in a pinned tensor and written in large
chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepspeed.ops.io.base_file_writer import BaseFileWriter, as_bytes


@dataclass(kw_only=True)
class FastFileWriterConfig:
    """Settings of `FastFileWriter`.

    Attributes:
        dnvme_handle: an `aio_handle`; flushing also waits for other operations in flight on it.
        pinned_tensor: host memory used as buffer, any dtype; best from `new_cpu_locked_tensor`.
        double_buffer: write one half of the buffer while the other is filled.
        num_parallel_writers, writer_rank: writers of one file; this release supports only 1 and 0.
        global_rank: of this process, for messages.
    """

    dnvme_handle: Any
    pinned_tensor: Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0

    def __post_init__(self) -> None:
        if self.num_parallel_writers != 1:
            raise ValueError(
                f"FastFileWriterConfig: num_parallel_writers = {self.num_parallel_writers}: this release "
                "supports one writer per file; let each rank write its own file"
            )
        if self.pinned_tensor.device.type != "cpu" or not self.pinned_tensor.is_contiguous():
            raise ValueError("FastFileWriterConfig: pinned_tensor must be a contiguous host tensor")
        if self.pinned_tensor.nbytes < 2:
            raise ValueError("FastFileWriterConfig: pinned_tensor is empty")


class FastFileWriter(BaseFileWriter):
    """File object for `torch.save(obj, writer)`. The file is complete after `close`, which raises the error of a failed
    background write (`OSError` with errno, path and offset)."""

    def __init__(self, file_path: str, config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        self._handle = config.dnvme_handle
        self._parts = _parts(config.pinned_tensor, 2 if config.double_buffer else 1)
        self._filled = 0  # bytes in the first part
        self._offset = 0  # bytes of the file that are written or in flight
        self._in_flight = False
        self._closed = False
        with open(file_path, "wb"):  # create or truncate
            pass

    def write(self, buffer: Any) -> int:
        if self._closed:
            raise ValueError(f"{self._file_path}: write to a closed FastFileWriter")
        data = as_bytes(buffer)
        done = 0
        while done < data.numel():
            part = self._parts[0]
            count = min(part.numel() - self._filled, data.numel() - done)
            part[self._filled : self._filled + count].copy_(data[done : done + count])
            self._filled += count
            done += count
            if self._filled == part.numel():
                self._drain()
        return done

    def _drain(self) -> None:
        """Start writing the filled part, and switch to the next one as soon as that is free."""
        self._join()
        if self._filled:
            self._handle.async_pwrite(self._parts[0][: self._filled], self._file_path, self._offset)
            self._in_flight = True
        self._offset += self._filled
        self._filled = 0
        self._parts.append(self._parts.pop(0))
        if len(self._parts) == 1:
            self._join()

    def _join(self) -> None:
        if self._in_flight:
            self._in_flight = False
            self._handle.wait()

    def flush(self) -> None:
        """Write all bytes so far to the file."""
        self._drain()
        self._join()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.flush()

    def split_index_list(self, storage_obj_list: Sequence[Any], num_splits: int) -> list[int]:
        """Split the list into `num_splits` runs of about equal size; return the end index of each run."""
        sizes = [as_bytes(storage).numel() for storage in storage_obj_list]
        total, seen, ends = sum(sizes), 0, []
        for index, size in enumerate(sizes):
            seen += size
            while len(ends) < num_splits - 1 and seen * num_splits >= total * (len(ends) + 1):
                ends.append(index + 1)
        return ends + [len(sizes)] * (num_splits - len(ends))

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[Any], save_size: bool) -> list[int]:
        """Write storages one after the other, each preceded by its number of elements (8 bytes, little-endian) if
        `save_size`, as in torch's old file format; return the file offset of each."""
        offsets = []
        for storage in storage_obj_list:
            offsets.append(self._offset + self._filled)
            if save_size:
                self.write(len(storage).to_bytes(8, "little"))
            self.write(storage)
        return offsets


def _parts(pinned: Tensor, count: int) -> list[Tensor]:
    """Split the tensor into `count` runs of bytes, page-aligned in size if larger than a page."""
    memory = as_bytes(pinned)
    size = memory.numel() // count
    if size > 4096:
        size -= size % 4096
    return [memory[i * size : (i + 1) * size] for i in range(count)]
