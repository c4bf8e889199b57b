"""The interface of a transport, and the choice of the one that moves the tensors of a group.

Each operation is a small object with one call (`AllGather`, `ReduceScatter`, ...); gloo, the process group's own
operations and shared memory are siblings with the same calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.hangs.history import OperationHistory
from deepspeed.comm.links import Sent, far_share
from deepspeed.comm.pending import Pending

if TYPE_CHECKING:
    from deepspeed.comm.transports import gloo, shared_memory

# A group imports what moves its bytes when its first message does: a rank alone sends none.


class AllGather(Protocol):
    def __call__(self, output: Tensor, input: Tensor) -> Pending: ...


class ReduceScatter(Protocol):
    def __call__(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending: ...


class AllReduce(Protocol):
    def __call__(self, tensor: Tensor, *, scale: float = 1.0) -> Pending: ...


class Reduce(Protocol):
    def __call__(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending: ...


class AllToAllTransport(Protocol):
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
    background: bool  # asynchronous operations finish without being waited for
    all_gather: AllGather
    reduce_scatter: ReduceScatter
    all_reduce: AllReduce
    all_reduce_max: AllReduceMax
    reduce: Reduce
    broadcast: Broadcast
    all_to_all: AllToAllTransport
    barrier: Barrier
    close: Callable[[], None] = lambda: None


class User(Protocol):
    """Owner of what `Wires.transport` returned."""

    def choose_again(self) -> None: ...


class Wires:
    """The transports of one process group. There is one of these per group and process: messages of a group have one
    numbering, and ranks attach to a segment of shared memory once, however many engines use the group."""

    def __init__(self, group: ProcessGroup, ranks: tuple[int, ...]) -> None:
        self.group, self.ranks = group, ranks
        self.history = OperationHistory(group.group_name, ranks)
        self._transports: dict[
            tuple[str, bool], Transport
        ] = {}  # by device type and permission to share memory
        self._gloo: gloo.GlooChannel | None = None
        self._shared: shared_memory.SharedMemoryChannel | None = None
        self._before = Sent()  # through channels that were closed
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.users: weakref.WeakSet[User] = weakref.WeakSet()

    def transport(self, device_type: str, *, may_share_memory: bool) -> Transport:
        """The one place where a transport is chosen. A collective call for CPU tensors over gloo, the first time."""
        found = self.chosen(device_type, may_share_memory=may_share_memory)
        if found is None:
            found = self._transports[device_type, may_share_memory] = self._make(
                device_type, may_share_memory
            )
        return found

    def chosen(self, device_type: str, *, may_share_memory: bool) -> Transport | None:
        """Return the transport that `transport` has returned before; None: nothing."""
        return self._transports.get((device_type, may_share_memory))

    def _make(self, device_type: str, may_share_memory: bool) -> Transport:
        if device_type == "cpu" and is_gloo(self.group):
            return self._over_gloo(may_share_memory)
        own = _process_group_transport(self.group, self.ranks)
        if device_type != "cpu" or _moves_host_tensors(self.group):
            return own
        return _staged_transport(own)

    def _over_gloo(self, may_share_memory: bool) -> Transport:
        from deepspeed.comm.transports import gloo, hosts

        if self._gloo is None:
            self._gloo = gloo.GlooChannel(self.group, self.ranks)
        met = hosts.meet(self._gloo, may_share_memory)
        self._gloo.know_hosts(met.blocks)
        self._shared = met.channel or self._shared
        fallback = _gloo_transport(self._gloo)
        if met.channel is None:
            return fallback
        if len(met.blocks) == 1:
            return _shared_memory_transport(met.channel, fallback)
        return _hierarchical_transport(met.channel, self._gloo, fallback)

    def sent(self) -> Sent:
        """Through gloo and shared memory, for all engines that use the group."""
        found = self._before
        if self._gloo is not None:
            found += Sent(self._gloo.sent_near, self._gloo.sent_far)
        return found if self._shared is None else found + Sent(self._shared.sent, 0)

    def far_share(self) -> float:
        """Return the share of the other ranks that are on other hosts."""
        blocks = None if self._gloo is None else self._gloo.blocks
        return far_share(self.ranks, self.group.rank(), blocks)

    def at_close(self, method: Callable[[], None]) -> None:
        """Call ``method`` (of an object that is not kept alive by this) before the group is destroyed."""
        self._at_close.append(weakref.WeakMethod(method))

    def close(self) -> None:
        """Release what the transports hold; they are chosen again if they are asked for again."""
        for reference in self._at_close:
            if (method := reference()) is not None:
                method()
        self._at_close.clear()
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        if self._shared is not None:
            self._before += Sent(self._shared.sent, 0)
            self._shared = None
        for user in self.users:
            user.choose_again()


def _gloo_transport(channel: gloo.GlooChannel) -> Transport:
    from deepspeed.comm.transports import gloo

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


def _hierarchical_transport(
    channel: shared_memory.SharedMemoryChannel, gloo_channel: gloo.GlooChannel, fallback: Transport
) -> Transport:
    from deepspeed.comm.transports import hierarchical  # for ranks on several hosts

    levels = hierarchical.TwoLevels(channel, gloo_channel)
    return Transport(
        name="hierarchical",
        background=False,
        all_gather=hierarchical.HierarchicalAllGather(levels),
        reduce_scatter=hierarchical.HierarchicalReduceScatter(levels, fallback.reduce_scatter),
        all_reduce=hierarchical.HierarchicalAllReduce(levels, fallback.all_reduce),
        all_reduce_max=hierarchical.HierarchicalAllReduceMax(levels, fallback.all_reduce_max),
        reduce=hierarchical.HierarchicalReduce(levels, fallback.reduce),
        broadcast=hierarchical.HierarchicalBroadcast(levels),
        all_to_all=hierarchical.HierarchicalAllToAll(levels),
        barrier=hierarchical.HierarchicalBarrier(levels),
        close=channel.close,
    )


def _shared_memory_transport(channel: shared_memory.SharedMemoryChannel, fallback: Transport) -> Transport:
    """`fallback` reduces the dtypes that the native code cannot."""
    from deepspeed.comm.transports import shared_memory

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


def _process_group_transport(group: ProcessGroup, ranks: tuple[int, ...]) -> Transport:
    from deepspeed.comm.transports import exchanged_sums, process_group

    exchanged = exchanged_sums.ExchangedSum(group, ranks)
    return Transport(
        name="process_group",
        background=True,
        all_gather=process_group.GroupAllGather(group, ranks),
        reduce_scatter=process_group.GroupReduceScatter(group, ranks, exchanged),
        all_reduce=process_group.GroupAllReduce(group, ranks, exchanged),
        all_reduce_max=process_group.GroupAllReduceMax(group, ranks),
        reduce=process_group.GroupReduce(group, ranks),
        broadcast=process_group.GroupBroadcast(group, ranks),
        all_to_all=process_group.GroupAllToAll(group, ranks),
        barrier=process_group.GroupBarrier(group, ranks),
    )


def _staged_transport(on_device: Transport) -> Transport:
    from deepspeed.comm.transports.staged import through_device

    return Transport(
        name="staged",
        background=False,
        all_gather=through_device(on_device.all_gather),
        reduce_scatter=through_device(on_device.reduce_scatter),
        all_reduce=through_device(on_device.all_reduce),
        all_reduce_max=through_device(on_device.all_reduce_max),
        reduce=through_device(on_device.reduce),
        broadcast=through_device(on_device.broadcast),
        all_to_all=through_device(on_device.all_to_all),
        barrier=on_device.barrier,
    )


def is_gloo(group: ProcessGroup) -> bool:
    """Return whether gloo moves this group's CPU tensors."""
    return _moves_host_tensors(group) and "Gloo" in type(group._get_backend(torch.device("cpu"))).__name__


def _moves_host_tensors(group: ProcessGroup) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:  # as of NCCL's groups
        return False
    return True
