"""Communication of the training core: a `Communicator` per process group and engine.

Transports belong to a process group and are kept per process (`GroupTransports`); settings, counters and logs are per
engine (`Network`).
"""

from __future__ import annotations

import atexit
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.environment import default_group
from deepspeed.comm.hangs.history import UNEVEN, OperationHistory, watch_callbacks
from deepspeed.comm.links import BytesSent
from deepspeed.comm.logging import PROCESS_LOG, measured, recording
from deepspeed.comm.pending import DONE, CommunicationError, OrderedPending, Pending
from deepspeed.comm.record import CommsLogger
from deepspeed.comm.reduction import sum_in_order
from deepspeed.comm.transports.choice import GroupTransports, Transport, is_gloo

if TYPE_CHECKING:
    from deepspeed.comm.hangs.thread_states import Names


__all__ = [
    "CommunicationError", "Communicator", "Network", "Pending", "Transport", "communicator", "forget_communicators",
    "use_shared_memory",
]  # fmt: skip

OPERATIONS = (
    "all_gather", "reduce_scatter", "all_reduce", "all_reduce_max", "broadcast", "reduce", "all_to_all",
)  # fmt: skip
"""Methods of a `Communicator` that move tensors."""

_LOG_NAMES = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce_max": "all_reduce",
    "all_to_all": "all_to_all_single",
}
"""Their names in the communication log, where those differ."""


class Communicator:
    """Collectives of one process group on flat tensors, with traffic counters of one network.

    On every transport, sums are taken in rank order in fp32 (fp64 and integers in their own dtype), multiplied by
    `scale` and rounded once to the output's dtype: equal inputs give equal bits, however the tensor is split into
    calls. (If a group spans hosts: in rank order on each host, then over hosts.) All ranks issue the same collectives
    in the same order; handles may be waited on in any order. A group of one rank never touches the network.
    """

    def __init__(self, group: ProcessGroup | None, network: Network | None = None) -> None:
        self.group = group
        self._network = network or process_network
        self._log = self._network.log
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        alone = (default_group() or (0, 1))[:1]
        self.ranks: tuple[int, ...] = alone if group is None else tuple(dist.get_process_group_ranks(group))
        self.bytes_sent = 0  # payload bytes sent by this rank
        self.bytes_fetched = 0  # of these, bytes that others read without a collective
        self.collectives: Counter[str] = Counter()
        self._transports: dict[str, Transport] = {}  # by device type
        self._cpu_transport: Transport | None = None  # shortcut to the CPU one
        self._group_transports = None if group is None else _transports_of(group, self.ranks)
        self._history = None if self._group_transports is None else self._group_transports.history
        if self._group_transports is not None:
            self._group_transports.users.add(self)

    def for_group(self, group: ProcessGroup) -> Communicator:
        """Return the communicator of another group in the same network."""
        return self._network.communicator(group)

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        """Gather the `input [n]` of every rank into `output [size * n]`, in rank order. `input` may be output's own
        shard, which saves a copy."""
        if self.size == 1 or input.numel() == 0:
            if output.data_ptr() != input.data_ptr():
                _flat(output).copy_(_flat(input))
            return DONE
        if output.numel() != input.numel() * self.size or output.dtype != input.dtype:
            raise self._mismatch("all_gather", output, input, f"output = {self.size} x input, of one dtype")
        operation = self._transport(output, input).all_gather
        output, input = _flat(output), _flat(input)
        sent = input.nbytes * (self.size - 1)
        return self._issue("all_gather", sent, input, lambda: operation(output, input))

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        """Sum `input [size * n]` over ranks, times `scale`, and store shard `rank` in `output [n]`. `output` may have
        a wider dtype, or be input's own shard; otherwise `input` is left unchanged."""
        if self.size == 1 or output.numel() == 0:
            return _single_rank(output, input, scale)
        if input.numel() != output.numel() * self.size:
            raise self._mismatch("reduce_scatter", output, input, f"input = {self.size} x output")
        operation = self._transport(output, input).reduce_scatter
        output, input = _flat(output), _flat(input)
        sent = input.nbytes * (self.size - 1) // self.size
        return self._issue(
            "reduce_scatter", sent, input, lambda: operation(output, input, scale=scale), message=output
        )

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        """Sum over ranks in place, times `scale`; the same bits as reduce_scatter followed by all_gather."""
        if self.size == 1 or tensor.numel() == 0:
            return _single_rank(tensor, tensor, scale)
        operation, flat = self._transport(tensor).all_reduce, _flat(tensor)
        sent = 2 * flat.nbytes * (self.size - 1) // self.size
        return self._issue("all_reduce", sent, flat, lambda: operation(flat, scale=scale))

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """Take the elementwise maximum over ranks, in place."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        operation, flat = self._transport(tensor).all_reduce_max, _flat(tensor)
        sent = 2 * flat.nbytes * (self.size - 1) // self.size
        return self._issue("all_reduce_max", sent, flat, lambda: operation(flat))

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        """Copy from rank `src` of this group (a group rank), in place."""
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        operation, flat = self._transport(tensor).broadcast, _flat(tensor)
        sent = flat.nbytes * (self.size - 1) if self.rank == src else 0
        return self._issue("broadcast", sent, flat, lambda: operation(flat, src), root=src)

    def reduce(self, tensor: Tensor, dst: int, *, scale: float = 1.0) -> Pending:
        """Sum over ranks, times `scale`, in place on group rank `dst`; the other tensors are left unchanged."""
        if self.size == 1 or tensor.numel() == 0:
            return _single_rank(tensor, tensor, scale)
        operation, flat = self._transport(tensor).reduce, _flat(tensor)
        sent = 0 if self.rank == dst else flat.nbytes
        return self._issue("reduce", sent, flat, lambda: operation(flat, dst, scale=scale), root=dst)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
    ) -> Pending:
        """Exchange runs: rank r's run for rank s becomes rank s's run from r. Runs are stored in rank order; the
        counts are their elements (None: all equal)."""
        output, input = _flat(output), _flat(input)
        if self.size == 1:
            output.copy_(input)
            return DONE
        received = output_counts or [output.numel() // self.size] * self.size
        sent = input_counts or [input.numel() // self.size] * self.size
        fitting = sum(received) == output.numel() and sum(sent) == input.numel()
        fitting = fitting and len(received) == len(sent) == self.size
        if not fitting or output.dtype != input.dtype or received[self.rank] != sent[self.rank]:
            raise self._mismatch("all_to_all", output, input, f"runs {received} and {sent}, of one dtype")
        operation = self._transport(output, input).all_to_all
        nbytes = (input.numel() - sent[self.rank]) * input.element_size()
        return self._issue(
            "all_to_all", nbytes, input, lambda: operation(output, input, received, sent), numel=UNEVEN
        )

    def barrier(self) -> Pending:
        """Wait until every rank has arrived here."""
        if self.size == 1:
            return DONE
        return self._issue("barrier", 0, None, self._transport_for(self._device_type()).barrier)

    def _device_type(self) -> str:
        assert self.group is not None
        return "cpu" if is_gloo(self.group) else get_accelerator().device_name()

    def at_close(self, method: Callable[[], None]) -> None:
        """Call ``method``, whose object is held weakly, before the group is destroyed."""
        if self._group_transports is not None:
            self._group_transports.at_close(method)

    def close(self) -> None:
        """Release the resources of the group's transports, for every network."""
        if self._group_transports is not None:
            self._group_transports.close()

    def forget_transports(self) -> None:
        """Forget the transports, to choose them again at their next use."""
        self._transports.clear()
        self._cpu_transport = None

    def sent_by_link(self) -> BytesSent:
        """Return the bytes that this rank has sent within its host and across (``links.py``); through gloo and shared
        memory, of all engines that use the group."""
        if self._group_transports is None:
            return BytesSent()
        elsewhere = any(transport.name == "process_group" for transport in self._transports.values())
        sent = self.bytes_sent if elsewhere else self.bytes_fetched
        return self._group_transports.sent() + BytesSent.split(sent, self._group_transports.far_share())

    def reset_counters(self) -> None:
        self.bytes_sent = self.bytes_fetched = 0
        self.collectives.clear()

    def count_fetch(self, whole: Tensor) -> None:
        """Count a one-sided fetch of the others' parts of ``whole``, who read as many bytes from this rank."""
        sent = whole.nbytes * (self.size - 1) // self.size
        self.collectives["fetch"] += 1
        self.bytes_sent += sent
        self.bytes_fetched += sent

    def _issue(
        self,
        kind: str,
        sent_bytes: int,
        tensor: Tensor | None,
        issue: Callable[[], Pending],
        *,
        numel: int | None = None,
        root: int | None = None,
        message: Tensor | None = None,
    ) -> Pending:
        """Start a collective of ``tensor``. Counts it, and records it for hang reports (with ``numel`` instead of the
        tensor's) and, if wanted, in the communication log, by the size of ``message`` (None: ``tensor``). Kept minimal,
        as it is in the path of every collective. (A local named ``operation`` would mark the wait for hang reports,
        `hangs/thread_states.py`, which is further inside.)"""
        self.collectives[kind] += 1
        self.bytes_sent += sent_bytes
        history = self._history
        if history is not None:
            history.count += 1
            if tensor is None:
                history.calls.append((kind, 0, None, root, self._network.phase))
            else:
                count = tensor.numel() if numel is None else numel
                history.calls.append((kind, count, tensor.dtype, root, self._network.phase))
        if self._log.enabled and tensor is not None:
            name = _LOG_NAMES.get(kind, kind)
            if recording(self._log, name):
                return measured(self._log, name, tensor if message is None else message, self.size, issue)
        return issue()

    def transport_name(self, device_type: str) -> str:
        """Return the name of the transport for tensors of this device: gloo, shared_memory, hierarchical,
        process_group or staged."""
        return self._transport_for(device_type).name

    def bypasses_group(self) -> bool:
        """Return whether CPU tensors are moved by something other than the process group's own operations."""
        return (self._cpu_transport or self._transport_for("cpu")).name != "process_group"

    def prepare(self) -> Communicator:
        """Choose the transport now. Otherwise the first collective, even an asynchronous one, chooses it, and waits
        for the other ranks."""
        if self.size > 1:
            self._transport_for(self._device_type())
        return self

    def works_in_background(self, device_type: str) -> bool:
        """Return whether asynchronous operations are issued without waiting for others, and finish regardless of what
        this rank does next."""
        if self._group_transports is None or self.size == 1:
            return True
        transport = self._transports.get(device_type) or self._group_transports.chosen(
            device_type, may_share_memory=self._network.may_share_memory()
        )
        return transport is not None and transport.background

    def _transport(self, tensor: Tensor, other: Tensor | None = None) -> Transport:
        if tensor.is_cpu and self._cpu_transport is not None and (other is None or other.is_cpu):
            return self._cpu_transport
        if other is not None and other.device != tensor.device:
            raise ValueError(
                f"a collective among ranks {list(self.ranks)}: {tensor.device} and {other.device}"
            )
        return self._transport_for(tensor.device.type)

    def _mismatch(self, operation: str, output: Tensor, input: Tensor, expected: str) -> ValueError:
        return ValueError(
            f"{operation} among ranks {list(self.ranks)}: output is {output.dtype} {tuple(output.shape)}, input "
            f"{input.dtype} {tuple(input.shape)}; expected {expected}"
        )

    def _transport_for(self, device_type: str) -> Transport:
        transport = self._transports.get(device_type)
        if transport is None:
            assert self._group_transports is not None
            transport = self._transports[device_type] = self._group_transports.transport(
                device_type, may_share_memory=self._network.may_share_memory()
            )
            if device_type == "cpu":
                self._cpu_transport = transport
        return transport

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Return itself: copies of a module that holds it communicate over the same group."""
        return self

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size}, ranks={list(self.ranks)})"


def _flat(tensor: Tensor) -> Tensor:
    """Return a 1-D view outside autograd. (The shortcut saves a microsecond.)"""
    if tensor.dim() == 1 and not tensor.requires_grad and tensor.is_contiguous():
        return tensor
    return tensor.detach().view(-1)


def _single_rank(output: Tensor, input: Tensor, scale: float) -> Pending:
    if scale != 1.0:
        sum_in_order(_flat(output), [_flat(input)], scale)
    elif output.data_ptr() != input.data_ptr() or output.dtype != input.dtype:
        _flat(output).copy_(_flat(input))
    return DONE


class Network:
    """Communication of one engine: its settings, call log, and communicators with their counters. The documented
    functions, which belong to no engine, have one too."""

    def __init__(self, *, shared_memory: bool = True, log: CommsLogger = PROCESS_LOG) -> None:
        self.shared_memory = shared_memory
        self.engines_share_memory = True
        """Of the documented functions' network: the default of engines whose config does not set it."""
        self.log = log
        self.phase = ""
        """Current phase of the engine's step; recorded with each collective."""
        self.names: Names | None = None
        """The engine's names of modules and parameters."""
        self.hang_report_seconds = 0.0
        self.waits: Any = None
        """Total waiting time of this rank (`timed.WaitTime`), if `communicator_class` is a timed communicator."""
        self.communicator_class: type[Communicator] = Communicator
        self._communicators: dict[ProcessGroup, Communicator] = {}

    def communicator(self, group: ProcessGroup) -> Communicator:
        """Return the communicator of `group`: one per group and network."""
        found = self._communicators.get(group)
        if found is None:
            _forget_destroyed_groups()
            found = self._communicators[group] = self.communicator_class(group, self)
        return found

    def communicators(self) -> list[Communicator]:
        """Return the communicators that this network has made."""
        return list(self._communicators.values())

    def sent_by_link(self) -> BytesSent:
        """Return the bytes that this rank has sent, within its host and across."""
        return sum((known.sent_by_link() for known in self.communicators()), BytesSent())

    def may_share_memory(self) -> bool:
        return self.shared_memory and os.environ.get("DS_SHM", "1") != "0"

    def use_shared_memory(self, wanted: bool) -> None:
        """Set whether tensors may move through shared memory between ranks on the same host. All ranks call this at the
        same point. Memory that other networks of the same groups use stays open."""
        if wanted != self.shared_memory:
            for known in self._communicators.values():
                known.forget_transports()
        self.shared_memory = wanted

    def leave(self) -> None:
        """End the hang watch of this network, at its engine's end."""
        watch_callbacks.leave(self)

    def forget(self, group: ProcessGroup) -> None:
        self._communicators.pop(group, None)


process_network = Network()
"""Network of the documented functions, which use the newest config with a `comm` section."""

_transports: dict[ProcessGroup, GroupTransports] = {}


def use_shared_memory(wanted: bool) -> None:
    """Set `comm.shared_memory` for the documented functions, and for engines whose config does not. All ranks call
    this at the same point, with nothing in flight. DS_SHM=0 in the environment always forbids it."""
    process_network.engines_share_memory = wanted
    process_network.use_shared_memory(wanted)


def communicator(group: ProcessGroup | None = None) -> Communicator:
    """Return the documented functions' communicator of `group` (None: the default group, or a single rank before
    torch.distributed is initialised). One per group: all users share its counters."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            return Communicator(None)
    return process_network.communicator(group)


def communicator_of(group: Communicator | ProcessGroup | None, *, prepared: bool = False) -> Communicator:
    """Return the documented functions' communicator of `group`; None: a single rank. A communicator is returned
    unchanged. ``prepared``: choose the transport of a process group now, for layers that are made once."""
    if isinstance(group, Communicator):
        return group
    if group is None or group.size() == 1:
        return Communicator(None)
    found = process_network.communicator(group)
    return found.prepare() if prepared else found


def histories() -> list[OperationHistory]:
    """Return the collective histories of every process group with a communicator."""
    return [transports.history for transports in list(_transports.values())]


def _transports_of(group: ProcessGroup, ranks: tuple[int, ...]) -> GroupTransports:
    found = _transports.get(group)
    if found is None:
        found = _transports[group] = GroupTransports(group, ranks)
    return found


def _forget_destroyed_groups() -> None:
    """Forget groups that were destroyed through torch.distributed."""
    for group in [known for known in _transports if not _is_registered(known)]:
        forget_communicators(group)


def _is_registered(group: ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def forget_communicators(group: ProcessGroup | None = None) -> None:
    """Drop the state of a destroyed group (None: of all groups)."""
    if group is None:
        watch_callbacks.end()
        OrderedPending.forget_all()
    for known in list(_transports) if group is None else [group]:
        process_network.forget(known)
        if known in _transports:
            _transports.pop(known).close()


_GLOO_RELEASE_S = 0.01


@atexit.register
def _close_at_exit() -> None:
    """End native threads before their tensors are freed, and let gloo's workers release theirs.

    A gloo worker that has finished an operation drops its references to tensors, for which it may need the
    interpreter lock. If the interpreter shuts down first, that ends the thread inside a destructor, and C++ then ends
    the whole process: "terminate called without an active exception", exit code 134, after an otherwise successful
    run.
    """
    forget_communicators()
    if dist.is_available() and dist.is_initialized() and "gloo" in dist.get_backend():
        time.sleep(_GLOO_RELEASE_S)  # releases the interpreter lock
