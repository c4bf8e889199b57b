"""What the training core knows of communication: a `Communicator` per process group.

Each operation is a small object with one call (`AllGather`, `ReduceScatter`, ...). Transports (gloo, the
backend's own operations, shared memory) are siblings with the same calls, chosen in `_select_transport`.
"""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator

from . import gloo, native, shared_memory
from .logging import measured, recording
from .pending import DONE, CommunicationError, OrderedPending, Pending
from .reduction import sum_in_order

__all__ = [
    "CommunicationError",
    "Communicator",
    "Pending",
    "Transport",
    "communicator",
    "forget_communicators",
]


class AllGather(Protocol):
    def __call__(self, output: Tensor, input: Tensor) -> Pending: ...


class ReduceScatter(Protocol):
    def __call__(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending: ...


class AllReduce(Protocol):
    def __call__(self, tensor: Tensor, *, scale: float = 1.0) -> Pending: ...


class Reduce(Protocol):
    def __call__(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending: ...


class AllToAll(Protocol):
    def __call__(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Pending: ...


class Barrier(Protocol):
    def __call__(self) -> Pending: ...


class AllReduceMax(Protocol):
    def __call__(self, tensor: Tensor) -> Pending: ...


class Broadcast(Protocol):
    def __call__(self, tensor: Tensor, src: int) -> Pending: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One way to move bytes, as one object per operation. Tensors are 1-D and contiguous."""

    name: str
    background: bool  # asynchronous operations finish without anybody waiting for them
    all_gather: AllGather
    reduce_scatter: ReduceScatter
    all_reduce: AllReduce
    all_reduce_max: AllReduceMax
    reduce: Reduce
    broadcast: Broadcast
    all_to_all: AllToAll
    barrier: Barrier
    close: Callable[[], None] = lambda: None


class Communicator:
    """Collectives of one process group on flat tensors, with traffic counters.

    Sums are taken over ranks in rank order in fp32 (fp64 and integers as they are), multiplied by `scale`
    and rounded once to the output's dtype, on every transport: equal inputs give equal bits, however the
    tensor is cut into calls. All ranks issue the same collectives in the same order; handles may be waited
    in any order. A group of one rank never touches the network.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.ranks: tuple[int, ...] = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.bytes_sent = 0  # payload this rank put on the wire
        self.collectives: Counter[str] = Counter()
        self._transports: dict[str, Transport] = {}  # by device type

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        """`output [size * n]` = the `input [n]` of every rank, in rank order. `input` may be output's own
        slice (nothing is copied then)."""
        if self.size == 1 or input.numel() == 0:
            if output.data_ptr() != input.data_ptr():
                output.detach().view(-1).copy_(input.detach().view(-1))
            return DONE
        operation = self._transport(output).all_gather
        output, input = output.detach().view(-1), input.detach().view(-1)
        self._count("all_gather", input.nbytes * (self.size - 1))
        if recording("all_gather_into_tensor"):
            return measured("all_gather_into_tensor", input, self.size, lambda: operation(output, input))
        return operation(output, input)

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        """`output [n]` = slice `rank` of the sum of all `input [size * n]`, times `scale`. `output` may have
        a wider dtype, or be input's own slice; `input` is left as it is otherwise."""
        if self.size == 1 or output.numel() == 0:
            return _single(output, input, scale)
        operation = self._transport(input).reduce_scatter
        output, input = output.detach().view(-1), input.detach().view(-1)
        self._count("reduce_scatter", input.nbytes * (self.size - 1) // self.size)
        if recording("reduce_scatter_tensor"):
            return measured(
                "reduce_scatter_tensor", output, self.size, lambda: operation(output, input, scale=scale)
            )
        return operation(output, input, scale=scale)

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        """In place sum over ranks times `scale`; the same bits as reduce_scatter followed by all_gather."""
        if self.size == 1 or tensor.numel() == 0:
            return _single(tensor, tensor, scale)
        operation, flat = self._transport(tensor).all_reduce, tensor.detach().view(-1)
        self._count("all_reduce", 2 * flat.nbytes * (self.size - 1) // self.size)
        if recording("all_reduce"):
            return measured("all_reduce", flat, self.size, lambda: operation(flat, scale=scale))
        return operation(flat, scale=scale)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """In place elementwise maximum over ranks."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        operation, flat = self._transport(tensor).all_reduce_max, tensor.detach().view(-1)
        self._count("all_reduce_max", 2 * flat.nbytes * (self.size - 1) // self.size)
        if recording("all_reduce"):
            return measured("all_reduce", flat, self.size, lambda: operation(flat))
        return operation(flat)

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        """In place copy from rank `src` of this group (counted inside the group)."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        operation, flat = self._transport(tensor).broadcast, tensor.detach().view(-1)
        self._count("broadcast", flat.nbytes * (self.size - 1) if self.rank == src else 0)
        if recording("broadcast"):
            return measured("broadcast", flat, self.size, lambda: operation(flat, src))
        return operation(flat, src)

    def reduce(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        """Sum over ranks times `scale`, in place on rank `dst` of this group; the others keep theirs."""
        if self.size == 1 or tensor.numel() == 0:
            return _single(tensor, tensor, scale)
        operation, flat = self._transport(tensor).reduce, tensor.detach().view(-1)
        self._count("reduce", 0 if self.rank == dst else flat.nbytes)
        if recording("reduce"):
            return measured("reduce", flat, self.size, lambda: operation(flat, dst, scale=scale))
        return operation(flat, dst, scale=scale)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
    ) -> Pending:
        """Rank r's run for rank s becomes rank s's run from r. Runs follow each other in rank order and have
        these numbers of elements (None: all equal)."""
        output, input = output.detach().view(-1), input.detach().view(-1)
        if self.size == 1:
            output.copy_(input)
            return DONE
        operation = self._transport(input).all_to_all
        received = output_counts or [output.numel() // self.size] * self.size
        sent = input_counts or [input.numel() // self.size] * self.size
        self._count("all_to_all", (input.numel() - sent[self.rank]) * input.element_size())
        if recording("all_to_all_single"):
            return measured(
                "all_to_all_single", input, self.size, lambda: operation(output, input, received, sent)
            )
        return operation(output, input, received, sent)

    def barrier(self) -> Pending:
        """Wait until every rank has come here."""
        if self.size == 1:
            return DONE
        self._count("barrier", 0)
        return self._transport_for(self._device_type()).barrier()

    def _device_type(self) -> str:
        assert self.group is not None
        return "cpu" if _is_gloo(self.group) else get_accelerator().device_name()

    def close(self) -> None:
        """Let go of what the transports hold."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def reset_counters(self) -> None:
        self.bytes_sent = 0
        self.collectives.clear()

    def _count(self, operation: str, sent_bytes: int) -> None:
        self.collectives[operation] += 1
        self.bytes_sent += sent_bytes

    def transport_name(self, device_type: str) -> str:
        """Which transport moves tensors of this device: "gloo", "shared_memory" or "native"."""
        return self._transport_for(device_type).name

    def prepare(self) -> Communicator:
        """Choose the transport now. Otherwise the first collective does, also an asynchronous one, and waits
        for the other ranks to come to it."""
        if self.size > 1:
            self._transport_for(self._device_type())
        return self

    def works_in_background(self, device_type: str) -> bool:
        """Whether an asynchronous operation can be issued without waiting for others, and then finishes
        whatever this rank does next."""
        transport = self._transports.get(device_type)
        return self.size == 1 or (transport is not None and transport.background)

    def _transport(self, tensor: Tensor) -> Transport:
        return self._transport_for(tensor.device.type)

    def _transport_for(self, device_type: str) -> Transport:
        transport = self._transports.get(device_type)
        if transport is None:
            transport = self._transports[device_type] = _select_transport(self, device_type)
        return transport

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size}, ranks={list(self.ranks)})"


def _single(output: Tensor, input: Tensor, scale: float) -> Pending:
    if scale != 1.0:
        sum_in_order(output.detach().view(-1), [input.detach().view(-1)], scale)
    elif output.data_ptr() != input.data_ptr() or output.dtype != input.dtype:
        output.detach().view(-1).copy_(input.detach().view(-1))
    return DONE


_shared_memory_wanted = True


def use_shared_memory(wanted: bool) -> None:
    """Config `comm.shared_memory`: whether groups that see their first collective from now on may communicate
    through shared memory where all their ranks share a host. The environment's DS_SHM=0 always forbids it."""
    global _shared_memory_wanted
    _shared_memory_wanted = wanted


def _select_transport(owner: Communicator, device_type: str) -> Transport:
    """The one place where a transport is chosen."""
    assert owner.group is not None
    if device_type != "cpu" or not _is_gloo(owner.group):
        return _native_transport(owner.group, owner.ranks)
    fallback = _gloo_transport(owner.group, owner.ranks)
    wanted = _shared_memory_wanted and os.environ.get("DS_SHM", "1") != "0"
    channel = shared_memory.connect(owner.group, owner.ranks, wanted)
    return fallback if channel is None else _shared_memory_transport(channel, fallback)


def _gloo_transport(group: ProcessGroup, ranks: tuple[int, ...]) -> Transport:
    channel = gloo.GlooChannel(group, ranks)
    return Transport(
        name="gloo",
        background=False,
        all_gather=gloo.GlooAllGather(channel),
        reduce_scatter=gloo.GlooReduceScatter(channel),
        all_reduce=gloo.GlooAllReduce(channel),
        all_reduce_max=gloo.GlooAllReduceMax(channel),
        reduce=gloo.GlooReduce(channel),
        broadcast=gloo.GlooBroadcast(channel),
        all_to_all=gloo.GlooAllToAll(channel),
        barrier=gloo.GlooBarrier(channel),
    )


def _shared_memory_transport(channel: shared_memory.SharedMemoryChannel, fallback: Transport) -> Transport:
    """`fallback` reduces the dtypes that the native code does not."""
    return Transport(
        name="shared_memory",
        background=True,
        all_gather=shared_memory.SharedMemoryAllGather(channel),
        reduce_scatter=shared_memory.SharedMemoryReduceScatter(channel, fallback.reduce_scatter),
        all_reduce=shared_memory.SharedMemoryAllReduce(channel, fallback.all_reduce),
        all_reduce_max=shared_memory.SharedMemoryAllReduceMax(channel, fallback.all_reduce_max),
        reduce=shared_memory.SharedMemoryReduce(channel, fallback.reduce),
        broadcast=shared_memory.SharedMemoryBroadcast(channel),
        all_to_all=shared_memory.SharedMemoryAllToAll(channel),
        barrier=shared_memory.SharedMemoryBarrier(channel),
        close=channel.close,
    )


def _native_transport(group: ProcessGroup, ranks: tuple[int, ...]) -> Transport:
    return Transport(
        name="native",
        background=True,
        all_gather=native.NativeAllGather(group, ranks),
        reduce_scatter=native.NativeReduceScatter(group, ranks),
        all_reduce=native.NativeAllReduce(group, ranks),
        all_reduce_max=native.NativeAllReduceMax(group, ranks),
        reduce=native.NativeReduce(group, ranks),
        broadcast=native.NativeBroadcast(group, ranks),
        all_to_all=native.NativeAllToAll(group, ranks),
        barrier=native.NativeBarrier(group, ranks),
    )


def _is_gloo(group: ProcessGroup) -> bool:
    try:
        return "Gloo" in type(group._get_backend(torch.device("cpu"))).__name__
    except RuntimeError:  # the group has no backend for CPU tensors
        return False


_communicators: dict[ProcessGroup, Communicator] = {}


def communicator(group: ProcessGroup | None = None) -> Communicator:
    """The communicator of `group` (None: the default group, or one rank alone before torch.distributed is
    initialised). One per group: its counters are shared by all users."""
    if group is None:
        if not dist.is_initialized():
            return Communicator(None)
        group = dist.group.WORLD
        assert group is not None
    found = _communicators.get(group)
    if found is None:
        for stale in [known for known in _communicators if not _is_registered(known)]:
            _communicators.pop(stale).close()  # destroyed behind our back
        found = _communicators[group] = Communicator(group)
    return found


def _is_registered(group: ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def forget_communicators(group: ProcessGroup | None = None) -> None:
    """Drop the communicator of a destroyed group (None: of all groups)."""
    if group is None:
        OrderedPending.forget_all()
    for known in list(_communicators) if group is None else [group]:
        if known in _communicators:
            _communicators.pop(known).close()


atexit.register(forget_communicators)  # native threads end before the tensors they work on
