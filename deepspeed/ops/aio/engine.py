"""Transfers between memory and files: the native engine, or Python threads if the native library is missing.

Both take an address, a length, a path and an offset, start immediately, and report errors when waited for.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Protocol

from deepspeed.ops import native

TRANSPORTS = ("io_uring", "libaio", "threads")
"""The native engine's kernel interfaces, best first (`enum ds_aio_transport`)."""

PYTHON = "python"
BACKEND_VARIABLE = "DS_AIO_BACKEND"
"""Environment variable: the first backend to try, from `TRANSPORTS` or "python"; unavailable ones are skipped."""

_PIECE = 1 << 30  # Linux moves less than 2 GiB per call


@dataclass(frozen=True, slots=True)
class AioOptions:
    """Options of `aio_handle`, in the order of ``struct ds_aio_options``."""

    block_size: int = 1 << 20
    queue_depth: int = 128
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1


class AioFailure(Exception):
    """Failure of a transfer at a byte offset; the handle adds the context. `detail`: what errno cannot express."""

    def __init__(self, errno: int, offset: int, detail: str = "") -> None:
        super().__init__(errno, offset, detail)
        self.errno = errno
        self.offset = offset
        self.detail = detail


class AioEngine(Protocol):
    backend: str

    def start(self, write: bool, address: int, nbytes: int, path: str, offset: int) -> int:
        """Start a transfer; return a ticket for `finish`. AioFailure: nothing was started."""
        ...

    def finish(self, ticket: int) -> None:
        """Wait for one transfer. AioFailure: it did not succeed."""
        ...

    def close(self) -> None:
        """Wait for transfers in flight and end the threads."""
        ...


def make_engine(options: AioOptions) -> AioEngine:
    wanted = os.environ.get(BACKEND_VARIABLE) or TRANSPORTS[0]
    if wanted not in (*TRANSPORTS, PYTHON):
        raise ValueError(
            f"{BACKEND_VARIABLE}={wanted!r}: expected one of {', '.join((*TRANSPORTS, PYTHON))}, or unset"
        )
    lib = library()
    if lib is None or wanted == PYTHON:
        return PythonEngine(options)
    return NativeEngine(lib, options, TRANSPORTS.index(wanted))


# ---- native ------------------------------------------------------------------------------------------------


class _Options(ctypes.Structure):
    _fields_ = native.fields(
        "", "block_size", "", "queue_depth single_submit overlap_events parallelism transport"
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the native library with the functions of csrc/aio; None without it, or outside Linux."""
    lib = native.library()
    if lib is None or not sys.platform.startswith("linux"):
        return None
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures = {
        "ds_aio_open": (pointer, (ctypes.POINTER(_Options), ctypes.POINTER(int32))),
        "ds_aio_close": (None, (pointer,)),
        "ds_aio_start": (int64, (pointer, int32, pointer, int64, ctypes.c_char_p, int64)),
        "ds_aio_finish": (int32, (pointer, int64, ctypes.POINTER(int64))),
        "ds_aio_alignment": (int32, (ctypes.c_char_p,)),
    }
    return None if native.declare(lib, signatures) else lib  # a library from an earlier build lacks some


class NativeEngine:
    """C++ worker threads (`csrc/aio`), one per degree of parallelism, each with its own kernel queue."""

    def __init__(self, lib: ctypes.CDLL, options: AioOptions, transport: int) -> None:
        fields = _Options(*astuple(options), transport)
        status = ctypes.c_int32()
        self._lib = lib
        self._engine: int | None = lib.ds_aio_open(ctypes.byref(fields), ctypes.byref(status))
        if not self._engine:
            raise OSError(-status.value, f"could not start {options.intra_op_parallelism} I/O threads")
        self.backend = TRANSPORTS[status.value]

    def start(self, write: bool, address: int, nbytes: int, path: str, offset: int) -> int:
        ticket: int = self._lib.ds_aio_start(self._engine, write, address, nbytes, os.fsencode(path), offset)
        if ticket < 0:
            raise AioFailure(-ticket, offset)
        return ticket

    def finish(self, ticket: int) -> None:
        offset = ctypes.c_int64()
        error: int = self._lib.ds_aio_finish(self._engine, ticket, ctypes.byref(offset))
        if error:
            raise AioFailure(error, offset.value)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine:
            self._lib.ds_aio_close(engine)


# ---- Python ------------------------------------------------------------------------------------------------


class PythonEngine:
    """Threads with pread and pwrite through the page cache; a transfer is split into one part per thread."""

    backend = PYTHON

    def __init__(self, options: AioOptions) -> None:
        self._parts = options.intra_op_parallelism
        self._pool = ThreadPoolExecutor(self._parts, thread_name_prefix="aio")
        self._futures: dict[int, list[Future[None]]] = {}
        self._tickets = 0

    def start(self, write: bool, address: int, nbytes: int, path: str, offset: int) -> int:
        try:
            self._check(write, path, offset + nbytes)
        except OSError as error:
            raise AioFailure(error.errno or errno.EIO, offset) from None
        memory = memoryview((ctypes.c_char * nbytes).from_address(address) if nbytes else b"").cast("B")
        step = max(-(-nbytes // self._parts), 1)
        self._futures[self._tickets] = [
            self._pool.submit(_move, write, path, memory[at : at + step], offset + at)
            for at in range(0, nbytes, step)
        ]
        self._tickets += 1
        return self._tickets - 1

    @staticmethod
    def _check(write: bool, path: str, end: int) -> None:
        with _opened(path, write) as file:
            if not write and os.fstat(file.fileno()).st_size < end:
                raise OSError(errno.ENODATA, "short file")

    def finish(self, ticket: int) -> None:
        failures = [error for future in self._futures.pop(ticket) if (error := future.exception())]
        if failures:
            raise failures[0]

    def close(self) -> None:
        self._pool.shutdown()


def _opened(path: str, write: bool) -> io.FileIO:
    flags = (os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY) | getattr(os, "O_BINARY", 0)
    return io.FileIO(os.open(path, flags, 0o666), "w" if write else "r")


def _move(write: bool, path: str, memory: memoryview, offset: int) -> None:
    done = 0
    try:
        with _opened(path, write) as file:
            file.seek(offset)
            while done < len(memory):
                piece = memory[done : done + _PIECE]
                moved = file.write(piece) if write else file.readinto(piece)
                if not moved:
                    raise OSError(errno.EIO if write else errno.ENODATA, "no progress")
                done += moved
    except OSError as error:
        raise AioFailure(error.errno or errno.EIO, offset + done) from None
