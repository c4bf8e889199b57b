"""A plain Python file, for comparison."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.io.base_file_writer import BaseFileWriter, as_bytes


class PyFileWriter(BaseFileWriter):
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
