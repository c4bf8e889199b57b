"""Define the interface of transports, and choose the one for a group.

Gloo, the process group's own operations, shared memory, and shared memory within hosts with gloo between them have
the same methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.hangs.history import OperationHistory
from deepspeed.comm.links import BytesSent, far_share
from deepspeed.comm.pending import Pending

if TYPE_CHECKING:
    from deepspeed.comm.transports import gloo, shared_memory

# Transports are imported at a group's first message: a single rank sends none.


class Transport(Protocol):
    """Moves the bytes of collectives. Tensors are 1-D and contiguous."""

    name: str
    background: bool
    """Whether asynchronous operations make progress without a `wait()`."""

    def all_gather(self, output: Tensor, input: Tensor) -> Pending: ...
    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending: ...
    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending: ...
    def all_reduce_max(self, tensor: Tensor) -> Pending: ...
    def reduce(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending: ...
    def broadcast(self, tensor: Tensor, src: int) -> Pending: ...
    def all_to_all(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Pending: ...
    def barrier(self) -> Pending: ...
    def close(self) -> None: ...


class GroupTransports:
    """The transports of one process group, shared by all engines that use it: a group's messages are numbered
    together, and ranks attach to a shared-memory segment once."""

    def __init__(self, group: ProcessGroup, ranks: tuple[int, ...]) -> None:
        self.group, self.ranks = group, ranks
        self.history = OperationHistory(group.group_name, ranks)
        self._transports: dict[tuple[str, bool], Transport] = {}
        """By device type and permission to share memory."""
        self._gloo: gloo.GlooChannel | None = None
        self._shared: shared_memory.SharedMemoryChannel | None = None
        self._sent_before = BytesSent()  # bytes sent through closed channels
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """Communicators that use a transport that `transport` returned."""

    def transport(self, device_type: str, *, may_share_memory: bool) -> Transport:
        """Return the transport, chosen at the first call, which is collective for CPU tensors over gloo."""
        found = self.chosen(device_type, may_share_memory=may_share_memory)
        if found is None:
            found = self._transports[device_type, may_share_memory] = self._make(
                device_type, may_share_memory
            )
        return found

    def chosen(self, device_type: str, *, may_share_memory: bool) -> Transport | None:
        """Return the transport if it has been chosen already, else None."""
        return self._transports.get((device_type, may_share_memory))

    def _make(self, device_type: str, may_share_memory: bool) -> Transport:
        if device_type == "cpu" and is_gloo(self.group):
            return self._make_gloo(may_share_memory)
        from deepspeed.comm.transports.process_group import ProcessGroupTransport, StagedTransport

        own = ProcessGroupTransport(self.group, self.ranks)
        staged = device_type == "cpu" and not _moves_host_tensors(self.group)
        return StagedTransport(own) if staged else own

    def _make_gloo(self, may_share_memory: bool) -> Transport:
        from deepspeed.comm.transports import gloo, hosts

        if self._gloo is None:
            self._gloo = gloo.GlooChannel(self.group, self.ranks)
        blocks, channel = hosts.connect_hosts(self._gloo, may_share_memory)
        self._gloo.set_hosts(blocks)
        self._shared = channel or self._shared
        over_gloo = gloo.GlooTransport(self._gloo)
        if channel is None:
            return over_gloo
        if len(blocks) == 1:
            from deepspeed.comm.transports.shared_memory import SharedMemoryTransport

            return SharedMemoryTransport(channel, over_gloo)
        from deepspeed.comm.transports.hierarchical import HierarchicalTransport  # only for several hosts

        return HierarchicalTransport(channel, over_gloo)

    def sent(self) -> BytesSent:
        """Return the bytes sent through gloo and shared memory, by all engines that use the group."""
        found = self._sent_before
        if self._gloo is not None:
            found += BytesSent(self._gloo.sent_near, self._gloo.sent_far)
        return found if self._shared is None else found + BytesSent(self._shared.sent, 0)

    def far_share(self) -> float:
        """Return the fraction of the other ranks that are on other hosts."""
        blocks = None if self._gloo is None else self._gloo.blocks
        return far_share(self.ranks, self.group.rank(), blocks)

    def at_close(self, method: Callable[[], None]) -> None:
        """Call ``method``, whose object is held weakly, before the group is destroyed."""
        self._at_close.append(weakref.WeakMethod(method))

    def close(self) -> None:
        """Release the transports' resources; they are chosen again at their next use."""
        for reference in self._at_close:
            if (method := reference()) is not None:
                method()
        self._at_close.clear()
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        if self._shared is not None:
            self._sent_before += BytesSent(self._shared.sent, 0)
            self._shared = None
        for user in self.users:
            user.forget_transports()


def is_gloo(group: ProcessGroup) -> bool:
    """Return whether gloo moves this group's CPU tensors."""
    return _moves_host_tensors(group) and "Gloo" in type(group._get_backend(torch.device("cpu"))).__name__


def _moves_host_tensors(group: ProcessGroup) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:  # such as an NCCL group
        return False
    return True
