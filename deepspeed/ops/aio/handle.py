"""`aio_handle`: reads and writes between tensors and files, in the foreground or the background."""

from __future__ import annotations

import errno
import os
import weakref
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from deepspeed.ops.aio.engine import AioEngine, AioFailure, AioOptions, make_engine
from deepspeed.ops.aio.memory import LockedMemory, host_buffer, is_locked, is_pinned


class pin_handle:
    """Allocates host tensors in locked memory (the op ``pin_memory``); base of ``aio_handle``."""

    def __init__(self) -> None:
        self._locked = LockedMemory()

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Allocate a 1-D host tensor of the example's dtype in aligned, resident (and, if limits allow, locked)
        memory."""
        if num_elem < 0:
            raise ValueError(f"new_cpu_locked_tensor: num_elem = {num_elem}: expected at least 0")
        return self._locked.new(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Release a tensor of ``new_cpu_locked_tensor``; its memory is freed with its last view. False: not such a
        tensor."""
        return self._locked.free(locked_tensor)

    def is_pinned(self, buffer: Tensor) -> bool:
        """Return whether the tensor, or its base, is locked memory of any handle or memory pinned by torch."""
        return self._locked.holds(buffer) or is_locked(buffer) or is_pinned(buffer)


File: TypeAlias = str | int | None
"""A path or an open descriptor; None if the descriptor is given as ``fd``."""
ALIGNMENT = 4096
"""In bytes. Memory addresses and offsets that are multiples of it never need an extra copy on current disks."""


class PendingTransfer(NamedTuple):
    """An operation in flight."""

    engine: AioEngine
    ticket: int
    write: bool
    filename: str
    offset: int  # in the file, bytes
    tensor: Tensor  # the caller's
    host: Tensor  # what the engine reads or writes: `tensor`, or its copy on the host; kept alive here
    validate: bool


class aio_handle(pin_handle):  # documented name
    """Moves tensors to and from files.

    Tensors are contiguous, of any dtype, on the host or on a device, pinned or not; files, offsets and addresses need
    no alignment. A write creates the file if it is missing and never truncates it. The number of bytes is the tensor's.

    Errors are `OSError`s with `errno`, `filename` and `offset` (byte of the file where it happened), raised immediately
    if the file cannot be opened, is too short to be read, or cannot grow, otherwise by the call that waits. A failed
    operation leaves the handle usable.

    Args:
        block_size: bytes per request to the disk; rounded up to whole pages.
        queue_depth: requests that each worker keeps in flight.
        single_submit: one system call per request instead of one per batch.
        overlap_events: refill the queue when any request completes; otherwise when half of the queue has completed.
        intra_op_parallelism: number of workers, which share each operation.
    """

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("queue_depth", queue_depth),
            ("intra_op_parallelism", intra_op_parallelism),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"aio_handle: {name} = {value!r}: expected an integer of at least 1")
        self._options = AioOptions(
            block_size, queue_depth, bool(single_submit), bool(overlap_events), intra_op_parallelism
        )
        super().__init__()
        self._pending: list[PendingTransfer] = []
        self._running: tuple[int, AioEngine] | None = None  # process id and its engine

    # ---- settings ------------------------------------------------------------------------------------------

    def get_block_size(self) -> int:
        return self._options.block_size

    def get_queue_depth(self) -> int:
        return self._options.queue_depth

    def get_single_submit(self) -> bool:
        return self._options.single_submit

    def get_overlap_events(self) -> bool:
        return self._options.overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._options.intra_op_parallelism

    def get_alignment(self) -> int:
        """Return the bytes to which both ends of a transfer may be aligned to save a copy; never required."""
        return ALIGNMENT

    @property
    def backend(self) -> str:
        """Return the engine that moves the bytes: io_uring, libaio, threads (native) or python."""
        return self._engine().backend

    # ---- transfers -----------------------------------------------------------------------------------------

    # A file is given as a path or an open descriptor: as `filename` or by the documented keyword `fd`.

    def read(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Fill the tensor from the file. With `validate` the bytes are read again by another method and compared."""
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Write the tensor to the file. With `validate` the file is read again and compared."""
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def pread(
        self,
        buffer: Tensor,
        filename: File = None,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Run `read`, or start it with `is_async`. Returns 1 (operation complete) or 0 (started)."""
        return self._transfer(False, buffer, _one_of(filename, fd), file_offset, validate, is_async)

    def pwrite(
        self,
        buffer: Tensor,
        filename: File = None,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Run `write`, or start it with `is_async`. Returns 1 (operation complete) or 0 (started)."""
        return self._transfer(True, buffer, _one_of(filename, fd), file_offset, validate, is_async)

    def sync_pread(
        self, buffer: Tensor, filename: File = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        return self._transfer(False, buffer, _one_of(filename, fd), file_offset)

    def sync_pwrite(
        self, buffer: Tensor, filename: File = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        return self._transfer(True, buffer, _one_of(filename, fd), file_offset)

    def async_pread(
        self, buffer: Tensor, filename: File = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Start a read; the tensor must not be used before `wait`."""
        return self._transfer(False, buffer, _one_of(filename, fd), file_offset, is_async=True)

    def async_pwrite(
        self, buffer: Tensor, filename: File = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Start a write; the tensor must not change before `wait`."""
        return self._transfer(True, buffer, _one_of(filename, fd), file_offset, is_async=True)

    def wait(self) -> int:
        """Wait for all operations in flight. Returns their number. If any failed, the error of the first one is raised
        after all have finished."""
        count, failure = len(self._pending), None
        while self._pending:  # each stays referenced until the engine has released its memory
            operation = self._pending.pop(0)
            try:
                _finish(operation)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return count

    def _transfer(
        self,
        write: bool,
        buffer: Tensor,
        filename: str | int,
        offset: int,
        validate: bool = False,
        is_async: bool = False,
    ) -> int:
        operation = self._start(write, buffer, filename, offset, validate)
        if is_async:
            self._pending.append(operation)
            return 0
        _finish(operation)
        return 1

    def _start(
        self, write: bool, buffer: Tensor, filename: str | int, offset: int, validate: bool
    ) -> PendingTransfer:
        _check(buffer, offset)
        path = f"/proc/self/fd/{filename}" if isinstance(filename, int) else os.fspath(filename)
        host, engine = self._on_host(buffer, copy=write), self._engine()
        try:
            ticket = engine.start(write, host.data_ptr(), host.nbytes, path, offset)
        except AioFailure as failure:
            raise _os_error(failure, write, path, offset, host.nbytes) from None
        return PendingTransfer(engine, ticket, write, path, offset, buffer, host, validate)

    def _on_host(self, buffer: Tensor, copy: bool) -> Tensor:
        """Return the tensor, or for a device tensor a host tensor of the same size, with its values if ``copy``."""
        if buffer.device.type == "cpu":
            return buffer
        host = host_buffer(buffer.nbytes).view(buffer.dtype).view(buffer.shape)
        return host.copy_(buffer.detach()) if copy else host

    def _engine(self) -> AioEngine:
        """Return this process's engine; its threads start on first use, and again after a fork, which does not copy
        them."""
        if self._running is None or self._running[0] != os.getpid():
            engine = self._new_engine()
            weakref.finalize(self, _close, engine, os.getpid())
            self._pending = []
            self._running = os.getpid(), engine
        return self._running[1]

    def _new_engine(self) -> AioEngine:
        return make_engine(self._options)

    # ---- memory --------------------------------------------------------------------------------------------

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Release a tensor of `new_cpu_locked_tensor`; its memory is freed with its last view. Returns False if the
        tensor is not from this handle."""
        return self._locked.free(tensor)


def _close(engine: AioEngine, process: int) -> None:
    if os.getpid() == process:
        engine.close()


def _one_of(filename: File, fd: int | None) -> str | int:
    if (filename is None) == (fd is None):
        raise TypeError("pass either filename or fd (an open descriptor)")
    return fd if fd is not None else filename  # type: ignore[return-value]  # one of them is given


def _check(buffer: Tensor, offset: int) -> None:
    if not isinstance(buffer, Tensor):
        raise TypeError(f"expected a tensor as buffer, not {type(buffer).__name__}")
    if not buffer.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(buffer.shape)} and strides {buffer.stride()} is not contiguous: "
            "transfer tensor.contiguous()"
        )
    if offset < 0:
        raise ValueError(f"file_offset = {offset}: expected at least 0")


def _finish(operation: PendingTransfer) -> None:
    """Wait for an operation, and copy what was read to its device."""
    try:
        operation.engine.finish(operation.ticket)
    except AioFailure as failure:
        nbytes = operation.host.nbytes
        raise _os_error(failure, operation.write, operation.filename, operation.offset, nbytes) from None
    if operation.validate:
        _validate(operation)
    if operation.host is not operation.tensor and not operation.write:
        with torch.no_grad():
            operation.tensor.copy_(operation.host)


def _os_error(failure: AioFailure, write: bool, filename: str, offset: int, nbytes: int) -> OSError:
    text = os.strerror(failure.errno)
    if failure.errno == errno.ENODATA and not write:
        size = os.path.getsize(filename) if os.path.exists(filename) else 0
        text = f"the file is too short ({size} bytes)"
    if failure.detail:
        text = f"{text}: {failure.detail}"
    action = "writing" if write else "reading"
    error = OSError(failure.errno, f"{text} ({action} {nbytes} bytes at offset {offset})", filename)
    error.offset = failure.offset  # type: ignore[attr-defined]
    return error


def _validate(operation: PendingTransfer) -> None:
    """Compare memory with the file, read with plain Python."""
    memory = operation.host.detach().reshape(-1).view(torch.uint8)
    step = 1 << 24
    with open(operation.filename, "rb") as file:
        file.seek(operation.offset)
        for begin in range(0, memory.numel(), step):
            part = memory[begin : begin + step].cpu()
            data = bytearray(file.read(part.numel()))
            if len(data) != part.numel() or not torch.equal(torch.frombuffer(data, dtype=torch.uint8), part):
                raise _os_error(
                    AioFailure(errno.EIO, operation.offset + begin),
                    operation.write,
                    operation.filename,
                    operation.offset,
                    memory.numel(),
                )
