"""cuFile, NVIDIA's library for transfers between files and GPU memory (GPUDirect Storage), as an ``AioEngine``.

Its calls are synchronous, so threads make them; each transfer is split over all threads. Block size, queue depth, and
the fallback on file systems without direct access are left to cuFile (`cufile.json`).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops import native
from deepspeed.ops.aio.engine import AioFailure, AioOptions

NAME = "libcufile.so.0"
_OPAQUE_FD = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
_FIRST_ERROR = 5000  # CUfileOpError: values below it are not cuFile errors
_PERMISSION_DENIED, _IO_NOT_SUPPORTED, _ALREADY_OPEN = 5025, 5008, 5026
_ERRNO = {_PERMISSION_DENIED: errno.EACCES, _IO_NOT_SUPPORTED: errno.EOPNOTSUPP}
_PAGE = 4096  # bytes of the file; threads never share a page, as cuFile may read, modify and write back whole pages


class _Status(ctypes.Structure):
    """CUfileError_t"""

    _fields_ = [("error", ctypes.c_int), ("cuda_error", ctypes.c_int)]


class _Source(ctypes.Union):
    _fields_ = [("descriptor", ctypes.c_int), ("handle", ctypes.c_void_p)]


class _Description(ctypes.Structure):
    """CUfileDescr_t"""

    _fields_ = [("kind", ctypes.c_int), ("source", _Source), ("operations", ctypes.c_void_p)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return cuFile with its signatures set, None if it is not installed."""
    try:
        lib = ctypes.CDLL(NAME, use_errno=True)
    except OSError:
        return None
    pointer, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "cuFileDriverOpen": (_Status, ()),
        "cuFileHandleRegister": (_Status, (ctypes.POINTER(pointer), ctypes.POINTER(_Description))),
        "cuFileHandleDeregister": (None, (pointer,)),
        "cuFileBufRegister": (_Status, (pointer, size, ctypes.c_int)),
        "cuFileBufDeregister": (_Status, (pointer,)),
        "cuFileRead": (ctypes.c_ssize_t, (pointer, pointer, size, offset, offset)),
        "cuFileWrite": (ctypes.c_ssize_t, (pointer, pointer, size, offset, offset)),
    }
    native.declare(lib, signatures)
    return lib


def open_driver(lib: Any) -> None:
    """Open the cuFile driver. OSError: cuFile does not work here."""
    code = lib.cuFileDriverOpen().error
    if code not in (0, _ALREADY_OPEN):
        raise OSError(
            _ERRNO.get(code, errno.ENODEV),
            f"cuFile failed to start (error {code}): see gdscheck and cufile.json",
        )


def register(lib: Any, address: int, nbytes: int) -> None:
    """Pin device memory for transfers."""
    code = lib.cuFileBufRegister(address, nbytes, 0).error
    if code:
        raise OSError(_ERRNO.get(code, errno.ENOMEM), f"cuFile cannot pin {nbytes} bytes (error {code})")


class CuFileEngine:
    """Implements `deepspeed.ops.aio.engine.AioEngine` for addresses in device memory."""

    backend = "cufile"

    def __init__(self, lib: Any, options: AioOptions) -> None:
        self._lib = lib
        self._parts = options.intra_op_parallelism
        self._pool = ThreadPoolExecutor(self._parts, thread_name_prefix="gds")
        self._in_flight: dict[int, tuple[_File, list[Future[None]]]] = {}
        self._tickets = 0

    def start(self, write: bool, address: int, nbytes: int, path: str, offset: int) -> int:
        file = _File(self._lib, write, path, offset, nbytes)
        device = get_accelerator().current_device()
        futures = [
            self._pool.submit(file.move, device, address, begin, end - begin)
            for begin, end in _parts(offset, nbytes, self._parts)
        ]
        self._tickets += 1
        self._in_flight[self._tickets] = file, futures
        return self._tickets

    def finish(self, ticket: int) -> None:
        file, futures = self._in_flight.pop(ticket)
        failures = [error for future in futures if (error := future.exception())]
        file.close()
        if failures:
            raise failures[0]

    def close(self) -> None:
        self._pool.shutdown()
        for file, _ in self._in_flight.values():
            file.close()


def _parts(offset: int, nbytes: int, count: int) -> list[tuple[int, int]]:
    """Split a transfer at file position `offset` into up to `count` runs [begin, end), at page boundaries of the
    file."""
    cuts = {(offset + nbytes * i // count) // _PAGE * _PAGE - offset for i in range(1, count)}
    places = [0, *sorted(cut for cut in cuts if 0 < cut < nbytes), nbytes]
    return list(itertools.pairwise(places)) if nbytes else []


class _File:
    """A file registered with cuFile, for one transfer."""

    def __init__(self, lib: Any, write: bool, path: str, offset: int, nbytes: int) -> None:
        self._lib, self._write, self._offset = lib, write, offset
        self._handle = ctypes.c_void_p()
        try:
            self._descriptor = _opened(path, write)
        except OSError as error:
            raise AioFailure(error.errno or errno.EIO, offset) from None
        try:
            if not write and os.fstat(self._descriptor).st_size < offset + nbytes:
                raise AioFailure(errno.ENODATA, offset)
            description = _Description(_OPAQUE_FD, _Source(descriptor=self._descriptor), None)
            code = lib.cuFileHandleRegister(ctypes.byref(self._handle), ctypes.byref(description)).error
            if code:
                raise _failure(code, offset)
        except AioFailure:
            os.close(self._descriptor)
            raise

    def move(self, device: int, address: int, begin: int, nbytes: int) -> None:
        """Transfer bytes [begin, begin + nbytes) of the operation, in a worker thread."""
        get_accelerator().set_device(device)
        call = self._lib.cuFileWrite if self._write else self._lib.cuFileRead
        done = 0
        while done < nbytes:
            offset = self._offset + begin + done
            moved = call(self._handle, address, nbytes - done, offset, begin + done)
            if moved < 0:
                own = moved != -1  # an error of cuFile, else of the system
                raise _failure(-moved, offset) if own else AioFailure(ctypes.get_errno() or errno.EIO, offset)
            if moved == 0:
                raise AioFailure(errno.EIO if self._write else errno.ENODATA, offset)
            done += moved

    def close(self) -> None:
        self._lib.cuFileHandleDeregister(self._handle)
        os.close(self._descriptor)


def _opened(path: str, write: bool) -> int:
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)  # a file system without direct access


def _failure(code: int, offset: int) -> AioFailure:
    detail = f"cuFile error {code}" if code > _FIRST_ERROR else ""
    return AioFailure(_ERRNO.get(code, errno.EIO), offset, detail)
