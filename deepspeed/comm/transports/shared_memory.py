"""Collectives of CPU tensors among the ranks of one host, through shared memory (csrc/comm).

There is one segment per process group: anonymous memory (memfd), which the other ranks open through /proc/<pid>/fd.
So it has no name that could clash with another job's or remain after a kill, and needs no space in /dev/shm. Data
moves through it in small slots: two ranks share 4 MiB, any number at most 64 MiB.

Operations run natively, in order of issue, in a thread of the channel or in the waiting thread.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.pending import CommunicationError, Pending
from deepspeed.ops import native

_ABI = 3

# enum ds_shm_kind
_ALL_GATHER, _REDUCE_SCATTER, _ALL_REDUCE, _ALL_REDUCE_MAX, _BROADCAST, _ALL_TO_ALL, _REDUCE, _BARRIER = (
    range(8)
)
_OPERATION_NAMES = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_reduce_max"),
    *("broadcast", "all_to_all", "reduce", "barrier"),
)
# enum ds_shm_status
_OK, _, _TIMEOUT, _DEAD, _LEFT, _CLOSED, _MISMATCH = range(7)
_REASONS = {
    _TIMEOUT: "it did not arrive within the timeout",
    _DEAD: "its process has exited",
    _LEFT: "it destroyed its process group",
    _CLOSED: "the process group was destroyed here",
}

# enum ds_dtype and enum ds_shm_dtype: dtypes that can be reduced
_DTYPES: dict[torch.dtype, int] = {
    **native.DTYPE_CODES,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}

# Spin time of a waiting thread before it sleeps: longer than a slot takes to fill, less than a time slice. 0 if ranks
# share cores, as the awaited rank may need this one.
_SPIN_US = 50


# struct ds_shm_operation with its ds_shm_call spread out: output, input, output_bytes, input_bytes, scale, count,
# kind, input_dtype, output_dtype, root. Packed bytes, because building them is twice as fast as a ctypes.Structure.
_OPERATION = struct.Struct("@PPPPdqiiii")


@dataclass(frozen=True, slots=True)
class _Call:
    """Description of an operation (struct ds_shm_call)."""

    count: int
    kind: int
    input_dtype: int
    output_dtype: int
    root: int

    @classmethod
    def of(cls, operation: bytes) -> _Call:
        return cls(*_OPERATION.unpack(operation)[5:])


class _Failure(ctypes.Structure):
    """struct ds_shm_failure, with its ds_shm_call spread out."""

    _fields_ = native.fields(
        "", "operations their_operations count", "", "kind input_dtype output_dtype root silent_rank"
    )

    def reason(self, status: int, kind: int) -> str:
        if status == _MISMATCH and self.kind == kind == _ALL_TO_ALL:
            return "that rank sends or expects a different number of bytes than this one"
        if status == _MISMATCH:
            return (
                f"that rank is in a different call, {_call_text(self)}. All ranks must issue the same "
                "collectives in the same order, with tensors of the same size and dtype"
            )
        reason = _REASONS[status]
        if self.silent_rank >= 0:
            reason += f"; it has begun {self.their_operations} collectives of this group, this rank {self.operations}"
        return reason


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the native library with the functions of csrc/comm, or None without it or Linux."""
    lib = native.library()
    if lib is None or not sys.platform.startswith("linux"):
        return None
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures = {
        "ds_shm_abi": (int32, ()),
        "ds_shm_create": (int32, (int32, ctypes.c_uint64)),
        "ds_shm_attach": (pointer, (ctypes.c_char_p, ctypes.c_uint64, int32, int32)),
        "ds_shm_start": (None, (pointer, int32, int64)),
        "ds_shm_issue": (int64, (pointer, ctypes.c_char_p)),  # struct ds_shm_operation
        "ds_shm_wait": (int32, (pointer, int64)),
        "ds_shm_completed": (int64, (pointer,)),
        "ds_shm_explain": (None, (pointer, pointer)),
        "ds_shm_close": (None, (pointer,)),
    }
    missing = native.declare(lib, signatures)  # a library without csrc/comm
    return None if missing or lib.ds_shm_abi() != _ABI else lib


def is_available() -> bool:
    """Return whether this build and platform support shared-memory communication."""
    return _library() is not None


def _call_text(call: _Call | _Failure) -> str:
    """Format a call: "all_reduce of 12 float32"."""
    name = _OPERATION_NAMES[call.kind]
    if call.kind in (_BARRIER, _ALL_TO_ALL):
        return name
    if call.kind == _BROADCAST:
        return f"{name} of {call.count} bytes from number {call.root} of the group"
    if call.kind == _ALL_GATHER:
        return f"{name} of {call.count} bytes"
    dtype = next(dtype for dtype, code in _DTYPES.items() if code == call.input_dtype)
    target = f" to number {call.root} of the group" if call.kind == _REDUCE else ""
    return f"{name} of {call.count} {str(dtype).removeprefix('torch.')}{target}"


class SharedMemoryChannel:
    """The native channel of one process group."""

    def __init__(self, lib: ctypes.CDLL, handle: int, ranks: tuple[int, ...], rank: int) -> None:
        self.lib = lib
        self.handle: int | None = handle
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self._pid = os.getpid()
        self._unwatched: list[tuple[int, tuple[Tensor, ...]]] = []
        self.sent = 0
        """Bytes that others read from this rank, counted as if sent over a link."""

    def start(self, timeout: timedelta, *, cores: int) -> None:
        """Start the channel, once every rank has attached; `cores`: their total number of cores."""
        spin_us = _SPIN_US if cores >= self.size else 0
        self.lib.ds_shm_start(self.handle, spin_us, int(timeout.total_seconds() * 1000))

    def issue(self, operation: bytes, *tensors: Tensor) -> Pending:
        if self._unwatched:
            self._unwatched = [one for one in self._unwatched if not self.is_done(one[0])]
        # An OrderedPending may be finished after its group was destroyed: then `wait()` raises.
        ticket = 0 if self.handle is None else self.lib.ds_shm_issue(self.handle, operation)
        return _SharedMemoryPending(self, ticket, operation, tensors)

    def keep(self, ticket: int, tensors: tuple[Tensor, ...]) -> None:
        """Keep the tensors of an operation that is never waited for until it is done, as native code uses raw
        addresses."""
        if self.handle is not None:
            self._unwatched.append((ticket, tensors))

    def is_done(self, ticket: int) -> bool:
        return self.handle is None or self.lib.ds_shm_completed(self.handle) >= ticket

    def error(self, status: int, operation: bytes) -> CommunicationError:
        call = _Call.of(operation)
        failure = _Failure(silent_rank=-1)
        if self.handle is not None:
            self.lib.ds_shm_explain(self.handle, ctypes.byref(failure))
        silent: int = failure.silent_rank
        return CommunicationError.of(
            _call_text(call),
            self.ranks,
            RuntimeError(failure.reason(status, call.kind)),
            silent=self.ranks[silent] if silent >= 0 else None,
        )

    def close(self) -> None:
        """Abandon operations in flight and unmap the segment. In a forked child the parent's segment is left alone."""
        handle, self.handle = self.handle, None
        if handle is not None and os.getpid() == self._pid:
            self.lib.ds_shm_close(handle)
        self._unwatched.clear()

    def __del__(self) -> None:
        self.close()


class _SharedMemoryPending(Pending):
    """A native operation in flight; holds its tensors until it is done."""

    __slots__ = ("_channel", "_operation", "_tensors", "_ticket")

    def __init__(
        self, channel: SharedMemoryChannel, ticket: int, operation: bytes, tensors: tuple[Tensor, ...]
    ) -> None:
        super().__init__()
        self._channel: SharedMemoryChannel | None = channel
        self._ticket, self._operation, self._tensors = ticket, operation, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        channel = self._channel
        if channel is not None:
            handle = channel.handle
            status: int = _CLOSED if handle is None else channel.lib.ds_shm_wait(handle, self._ticket)
            self._channel = None
            if status != _OK:
                self._error = channel.error(status, self._operation)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._channel is None or self._channel.is_done(self._ticket)

    def __str__(self) -> str:
        return _call_text(_Call.of(self._operation))

    def __del__(self) -> None:
        if self._channel is not None:
            self._channel.keep(self._ticket, self._tensors)


def create_segment(size: int) -> tuple[int, int]:
    """Create shared memory for `size` ranks; return (file descriptor, token). The others open
    /proc/<pid>/fd/<descriptor>, after which it is to be closed. On failure the descriptor is a negative errno."""
    lib = _library()
    token = secrets.randbits(63)
    descriptor: int = -errno.ENOSYS if lib is None else lib.ds_shm_create(size, token)
    return descriptor, token


def attach(
    pid: int, descriptor: int, token: int, rank: int, ranks: tuple[int, ...]
) -> SharedMemoryChannel | None:
    """Map the segment of process `pid` as `rank` of these global ranks; None if impossible."""
    lib = _library()
    if lib is None:
        return None
    path = f"/proc/{pid}/fd/{descriptor}".encode()
    handle: int | None = lib.ds_shm_attach(path, token, rank, len(ranks))
    return None if handle is None else SharedMemoryChannel(lib, handle, ranks, rank)


class SharedMemoryTransport:
    """Transport over one channel. ``fallback``: the transport for dtypes that native code cannot reduce; None: the
    caller checks `can_reduce` first."""

    name, background = "shared_memory", True

    def __init__(self, channel: SharedMemoryChannel, fallback: Any = None) -> None:
        self.channel, self.fallback = channel, fallback

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        self.channel.sent += input.nbytes * (self.channel.size - 1)
        operation = _copy(_ALL_GATHER, output, input, input.nbytes)
        return self.channel.issue(operation, output, input)

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        if not can_reduce(input.dtype, output.dtype):
            return self.fallback.reduce_scatter(output, input, scale=scale)
        self.channel.sent += input.nbytes * (self.channel.size - 1) // self.channel.size
        operation = _reduction(_REDUCE_SCATTER, output, input, scale)
        return self.channel.issue(operation, output, input)

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        if tensor.dtype not in _DTYPES:
            return self.fallback.all_reduce(tensor, scale=scale)
        self.channel.sent += 2 * tensor.nbytes * (self.channel.size - 1) // self.channel.size
        return self.channel.issue(_reduction(_ALL_REDUCE, tensor, tensor, scale), tensor)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        if not can_reduce(tensor.dtype, tensor.dtype):
            return self.fallback.all_reduce_max(tensor)
        self.channel.sent += 2 * tensor.nbytes * (self.channel.size - 1) // self.channel.size
        return self.channel.issue(_reduction(_ALL_REDUCE_MAX, tensor, tensor, 1.0), tensor)

    def reduce(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        if not can_reduce(tensor.dtype, tensor.dtype):
            return self.fallback.reduce(tensor, dst, scale=scale)
        self.channel.sent += 0 if self.channel.rank == dst else tensor.nbytes
        return self.channel.issue(_reduction(_REDUCE, tensor, tensor, scale, dst), tensor)

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        self.channel.sent += tensor.nbytes * (self.channel.size - 1) if self.channel.rank == src else 0
        return self.channel.issue(_copy(_BROADCAST, tensor, tensor, tensor.nbytes, src), tensor)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Pending:
        item = input.element_size()
        self.channel.sent += (input.numel() - input_counts[self.channel.rank]) * item
        # A tensor, so that it is kept alive with the other tensors.
        counts = torch.tensor([output_counts, input_counts], dtype=torch.int64) * item
        operation = _OPERATION.pack(
            *(tensor.data_ptr() for tensor in (output, input, *counts)), 1.0, 0, _ALL_TO_ALL, 0, 0, 0
        )
        return self.channel.issue(operation, output, input, counts)

    def barrier(self) -> Pending:
        return self.channel.issue(_OPERATION.pack(0, 0, 0, 0, 1.0, 0, _BARRIER, 0, 0, 0))

    def close(self) -> None:
        self.channel.close()


def can_reduce(input: torch.dtype, output: torch.dtype) -> bool:
    """Return whether the native code can sum these dtypes; it converts only between fp32, bf16 and fp16."""
    return input in _DTYPES and (input == output or {input, output} <= native.DTYPE_CODES.keys())


def _copy(kind: int, output: Tensor, input: Tensor, nbytes: int, root: int = 0) -> bytes:
    return _OPERATION.pack(output.data_ptr(), input.data_ptr(), 0, 0, 1.0, nbytes, kind, 0, 0, root)


def _reduction(kind: int, output: Tensor, input: Tensor, scale: float, root: int = 0) -> bytes:
    dtype = _DTYPES[input.dtype]
    if scale != 1.0 and not input.dtype.is_floating_point:
        raise ValueError(f"scale={scale} with dtype {input.dtype}: integers can only be summed (scale=1)")
    given = input.data_ptr()
    if output is input:  # in place: a fast path, as packing is a good part of a small call's cost
        return _OPERATION.pack(given, given, 0, 0, scale, input.numel(), kind, dtype, dtype, root)
    target, wide = output.data_ptr(), _DTYPES[output.dtype]
    return _OPERATION.pack(target, given, 0, 0, scale, output.numel(), kind, dtype, wide, root)
