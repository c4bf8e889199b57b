"""Communication as the training core sees it: a `Communicator` per process group."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator

from .logging import measured, recording
from .pending import DONE, CommunicationError, OrderedPending, Pending
from .reduction import sum_in_order
from .transport import (
    AllGather,
    AllReduce,
    ReduceScatter,
    Transport,
    is_gloo,
    select_transport,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "CommunicationError",
    "Communicator",
    "Pending",
    "ReduceScatter",
    "Transport",
    "communicator",
    "forget_communicators",
    "use_shared_memory",
]


class Communicator:
    """Collectives of one process group on flat tensors, with traffic counters.

    Sums are taken over ranks in rank order in fp32 (fp64 and integers as they are), multiplied by `scale`
    and rounded once to the output's dtype, on every transport: equal inputs give equal bits, however the
    tensor is split into calls. (If a group spans hosts: in rank order on each host, then over hosts.) All
    ranks issue the same collectives in the same order; handles may be waited on in any order. A group of one
    rank never touches the network.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.ranks: tuple[int, ...] = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.bytes_sent = 0  # payload this rank put on the wire
        self.collectives: Counter[str] = Counter()
        self._transports: dict[str, Transport] = {}  # by device type
        self._cpu_transport: Transport | None = None  # the same one, for faster access
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        """`output [size * n]` = the `input [n]` of every rank, in rank order. `input` may be output's own
        slice (nothing is copied then)."""
        if self.size == 1 or input.numel() == 0:
            if output.data_ptr() != input.data_ptr():
                output.detach().view(-1).copy_(input.detach().view(-1))
            return DONE
        if output.numel() != input.numel() * self.size or output.dtype != input.dtype:
            raise self._unfit("all_gather", output, input, f"output = {self.size} x input, of one dtype")
        operation = self._transport(output, input).all_gather
        output, input = _flat(output), _flat(input)
        self._count("all_gather", input.nbytes * (self.size - 1))
        if recording("all_gather_into_tensor"):
            return measured("all_gather_into_tensor", input, self.size, lambda: operation(output, input))
        return operation(output, input)

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        """`output [n]` = slice `rank` of the sum of all `input [size * n]`, times `scale`. `output` may have
        a wider dtype, or be input's own slice; otherwise `input` is left unchanged."""
        if self.size == 1 or output.numel() == 0:
            return _single(output, input, scale)
        if input.numel() != output.numel() * self.size:
            raise self._unfit("reduce_scatter", output, input, f"input = {self.size} x output")
        operation = self._transport(output, input).reduce_scatter
        output, input = _flat(output), _flat(input)
        self._count("reduce_scatter", input.nbytes * (self.size - 1) // self.size)
        if recording("reduce_scatter_tensor"):
            return measured(
                "reduce_scatter_tensor", output, self.size, lambda: operation(output, input, scale=scale)
            )
        return operation(output, input, scale=scale)

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        """In-place sum over ranks times `scale`; the same bits as reduce_scatter followed by all_gather."""
        size = self.size
        if size == 1 or tensor.numel() == 0:
            return _single(tensor, tensor, scale)
        operation, flat = self._transport(tensor).all_reduce, _flat(tensor)
        self.collectives["all_reduce"] += 1
        self.bytes_sent += 2 * flat.nbytes * (size - 1) // size
        if recording("all_reduce"):
            return measured("all_reduce", flat, self.size, lambda: operation(flat, scale=scale))
        return operation(flat, scale=scale)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """In-place elementwise maximum over ranks."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        operation, flat = self._transport(tensor).all_reduce_max, _flat(tensor)
        self._count("all_reduce_max", 2 * flat.nbytes * (self.size - 1) // self.size)
        if recording("all_reduce"):
            return measured("all_reduce", flat, self.size, lambda: operation(flat))
        return operation(flat)

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        """In-place copy from rank `src` of this group (a rank within the group)."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        operation, flat = self._transport(tensor).broadcast, _flat(tensor)
        self._count("broadcast", flat.nbytes * (self.size - 1) if self.rank == src else 0)
        if recording("broadcast"):
            return measured("broadcast", flat, self.size, lambda: operation(flat, src))
        return operation(flat, src)

    def reduce(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        """Sum over ranks times `scale`, in place on rank `dst` of this group; the others keep theirs."""
        if self.size == 1 or tensor.numel() == 0:
            return _single(tensor, tensor, scale)
        operation, flat = self._transport(tensor).reduce, _flat(tensor)
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
        """Rank r's run for rank s becomes rank s's run from r. Runs are stored in rank order and have these
        numbers of elements (None: all equal)."""
        output, input = _flat(output), _flat(input)
        if self.size == 1:
            output.copy_(input)
            return DONE
        received = output_counts or [output.numel() // self.size] * self.size
        sent = input_counts or [input.numel() // self.size] * self.size
        fitting = sum(received) == output.numel() and sum(sent) == input.numel()
        fitting = fitting and len(received) == len(sent) == self.size
        if not fitting or output.dtype != input.dtype or received[self.rank] != sent[self.rank]:
            raise self._unfit("all_to_all", output, input, f"runs {received} and {sent}, of one dtype")
        operation = self._transport(output, input).all_to_all
        self._count("all_to_all", (input.numel() - sent[self.rank]) * input.element_size())
        if recording("all_to_all_single"):
            return measured(
                "all_to_all_single", input, self.size, lambda: operation(output, input, received, sent)
            )
        return operation(output, input, received, sent)

    def barrier(self) -> Pending:
        """Wait until every rank has arrived here."""
        if self.size == 1:
            return DONE
        self._count("barrier", 0)
        return self._transport_for(self._device_type()).barrier()

    def _device_type(self) -> str:
        assert self.group is not None
        return "cpu" if is_gloo(self.group) else get_accelerator().device_name()

    def at_close(self, method: Callable[[], None]) -> None:
        """Call ``method`` (of an object that is not kept alive by this) before the group is destroyed."""
        self._at_close.append(weakref.WeakMethod(method))

    def close(self) -> None:
        """Release what the transports hold."""
        for reference in self._at_close:
            if (method := reference()) is not None:
                method()
        self._at_close.clear()
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self._cpu_transport = None

    def reset_counters(self) -> None:
        self.bytes_sent = 0
        self.collectives.clear()

    def _count(self, operation: str, sent_bytes: int) -> None:
        self.collectives[operation] += 1
        self.bytes_sent += sent_bytes

    def transport_name(self, device_type: str) -> str:
        """Which transport moves tensors of this device: gloo, shared_memory, hierarchical or native."""
        return self._transport_for(device_type).name

    def is_faster_than_its_group(self) -> bool:
        """Whether CPU tensors are moved by something other than the process group's own operations."""
        return (self._cpu_transport or self._transport_for("cpu")).name != "native"

    def prepare(self) -> Communicator:
        """Choose the transport now. Otherwise the first collective does so, even an asynchronous one, and waits
        for the other ranks to reach it."""
        if self.size > 1:
            self._transport_for(self._device_type())
        return self

    def works_in_background(self, device_type: str) -> bool:
        """Whether an asynchronous operation can be issued without waiting for others, and finishes
        regardless of what this rank does next."""
        transport = self._transports.get(device_type)
        return self.size == 1 or (transport is not None and transport.background)

    def _transport(self, tensor: Tensor, other: Tensor | None = None) -> Transport:
        if tensor.is_cpu and self._cpu_transport is not None and (other is None or other.is_cpu):
            return self._cpu_transport
        if other is not None and other.device != tensor.device:
            raise ValueError(
                f"a collective among ranks {list(self.ranks)}: {tensor.device} and {other.device}"
            )
        return self._transport_for(tensor.device.type)

    def _unfit(self, operation: str, output: Tensor, input: Tensor, expected: str) -> ValueError:
        return ValueError(
            f"{operation} among ranks {list(self.ranks)}: output is {output.dtype} {tuple(output.shape)}, input "
            f"{input.dtype} {tuple(input.shape)}; expected {expected}"
        )

    def _transport_for(self, device_type: str) -> Transport:
        transport = self._transports.get(device_type)
        if transport is None:
            assert self.group is not None
            transport = self._transports[device_type] = select_transport(
                self.group, self.ranks, device_type, may_share_memory=_may_share_memory()
            )
            if device_type == "cpu":
                self._cpu_transport = transport
        return transport

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size}, ranks={list(self.ranks)})"


def _flat(tensor: Tensor) -> Tensor:
    """The same memory in one dimension, outside autograd. (The shortcut saves a microsecond.)"""
    if tensor.dim() == 1 and not tensor.requires_grad and tensor.is_contiguous():
        return tensor
    return tensor.detach().view(-1)


def _single(output: Tensor, input: Tensor, scale: float) -> Pending:
    if scale != 1.0:
        sum_in_order(output.detach().view(-1), [input.detach().view(-1)], scale)
    elif output.data_ptr() != input.data_ptr() or output.dtype != input.dtype:
        output.detach().view(-1).copy_(input.detach().view(-1))
    return DONE


_shared_memory_wanted = True


def use_shared_memory(wanted: bool) -> None:
    """Config `comm.shared_memory`: whether groups may communicate through shared memory between ranks on the same
    host. All ranks call this at the same point, with nothing in flight: groups choose again if it changes.
    DS_SHM=0 in the environment always forbids it."""
    global _shared_memory_wanted
    if wanted != _shared_memory_wanted:
        for known in _communicators.values():
            known.close()
    _shared_memory_wanted = wanted


def _may_share_memory() -> bool:
    return _shared_memory_wanted and os.environ.get("DS_SHM", "1") != "0"


_communicators: dict[ProcessGroup, Communicator] = {}


def communicator(group: ProcessGroup | None = None) -> Communicator:
    """The communicator of `group` (None: the default group, or one rank alone before torch.distributed is
    initialised). One per group: all users share its counters."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            return Communicator(None)
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


_LET_GO_S = 0.01


@atexit.register
def _end() -> None:
    """End native threads before the tensors they work on are freed, and let gloo's workers release theirs.

    When a gloo worker is done with an operation it drops its references to tensors, for which it may need the
    interpreter lock. If the interpreter shuts down first, that ends the thread inside a destructor, and C++ then ends
    the whole process: "terminate called without an active exception", exit code 134, after an otherwise successful run.
    """
    forget_communicators()
    if dist.is_available() and dist.is_initialized() and "gloo" in dist.get_backend():
        time.sleep(_LET_GO_S)  # the lock is free meanwhile
