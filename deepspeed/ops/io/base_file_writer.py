"""Base class of all writers, with the path and the context-manager protocol, and the two plain ones."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self


class BaseFileWriter:
    """A write-only file, written sequentially."""

    def __init__(self, file_path: str) -> None:
        self._file_path = str(file_path)

    def file_path(self) -> str:
        return self._file_path

    def write(self, buffer: Any) -> int:
        """Write a bytes-like object, a tensor or a torch storage. Returns its number of bytes."""
        raise NotImplementedError

    def flush(self) -> None:
        """Flush written data to the file, as far as the writer can before it is closed."""

    def close(self) -> None:
        """Complete and close the file."""

    def fileno(self) -> int:
        """Raise: there is no descriptor for others to write to, so torch passes all bytes to `write`."""
        raise io.UnsupportedOperation(f"{type(self).__name__} has no file descriptor")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def as_bytes(buffer: Any) -> Tensor:
    """Return the bytes of a bytes-like object, a tensor or a torch storage, as a 1-D uint8 tensor on the host; a view
    if possible."""
    if isinstance(buffer, torch.TypedStorage):
        buffer = buffer._untyped_storage
    if isinstance(buffer, torch.UntypedStorage):
        buffer = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer)
    if isinstance(buffer, Tensor):
        return buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
    view = memoryview(buffer).cast("B")
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():  # about read-only memory, which is never written here
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


class PyFileWriter(BaseFileWriter):
    """Writes a plain Python file, as a baseline."""

    def __init__(self, file_path: str) -> None:
        super().__init__(file_path)
        self._file = open(file_path, "wb")  # noqa: SIM115  # closed by close()

    def write(self, buffer: Any) -> int:
        return self._file.write(as_bytes(buffer).numpy())  # pyright: ignore[reportArgumentType]  # numpy arrays are buffers

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class MockFileWriter(BaseFileWriter):
    """Writes nothing, to measure the cost of serialization alone; `num_bytes` and `num_writes` count."""

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
        """Count the storages, plus 8 bytes each for the size if `save_size`. Returns the number of bytes."""
        return sum(self.write(storage) + 8 * bool(save_size) for storage in storage_obj_list)
