"""Counts every operation at torch's dispatcher, and attributes it to a module.

Forward hooks track the running module. An operation of a backward belongs to the module whose forward created its
autograd node: nodes carry increasing sequence numbers, so the numbers at which a forward enters and leaves modules map
each node to its module. Operations with gradients enabled during a backward belong to a forward that activation
checkpointing recomputes.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.base.accelerator import get_accelerator, synchronize_stream
from deepspeed.base.sharded import full_numel
from deepspeed.observe.flops.formulas import FORMULAS, Formula, OpWork

NONE_RUNS = -1
"""torch's graph task id while no backward runs."""


@dataclass
class WorkCount:
    """Accumulated MACs and flops."""

    macs: int = 0
    flops: int = 0

    def add(self, work: OpWork) -> None:
        self.macs += work.macs
        self.flops += work.flops


@dataclass
class CountRecord:
    """Counts of one module. MACs and flops exclude its submodules; time and bytes include them."""

    forward: WorkCount = field(default_factory=WorkCount)
    backward: WorkCount = field(default_factory=WorkCount)
    recomputed: WorkCount = field(default_factory=WorkCount)
    seconds: float = 0.0
    calls: int = 0
    held: int = 0
    """Bytes that its forward allocated and left alive (outputs, tensors saved for backward); the maximum over its
    calls."""
    peak: int = 0
    """Peak bytes that its forward allocated; the maximum over its calls."""

    def reset(self) -> None:
        self.forward, self.backward, self.recomputed = WorkCount(), WorkCount(), WorkCount()
        self.seconds, self.calls, self.held, self.peak = 0.0, 0, 0, 0


_RECORD = "_flops_record"


def record_of(module: nn.Module) -> CountRecord | None:
    """Return the record of the module; None if it is not profiled."""
    return vars(module).get(_RECORD)


def forget(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(_RECORD, None)


class NodeOwners:
    """Maps the autograd nodes that one thread created to modules, by the nodes' sequence numbers."""

    def __init__(self) -> None:
        self.task = NONE_RUNS
        """Graph task id of the backward in which this thread last noted a maker."""
        self._from: list[int] = []
        self._records: list[CountRecord | None] = []

    def note(self, record: CountRecord | None) -> None:
        """Attribute the nodes created from now on to ``record``."""
        self.task = torch._C._current_graph_task_id()
        number = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
        self._from.append(number)
        self._records.append(record)

    def of(self, node: Node) -> CountRecord | None:
        place = bisect_right(self._from, node._sequence_nr()) - 1
        return self._records[place] if place >= 0 else None


class OpCounter(TorchDispatchMode):
    """Counts the operations of the modules of ``model`` between ``begin`` and ``end``. The records stay on the modules.

    Args:
        model: Every module in it gets a record.
        ignored: Module types whose operations count for the module that calls them.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, ignored: Collection[type] = ()) -> None:
        super().__init__()
        self.model = model
        self.modules = [
            module for module in model.modules() if not isinstance(module, (*ignored, torch.jit.ScriptModule))
        ]
        self._running: list[tuple[CountRecord, float]] = []
        """Records of the running modules, outermost first, each with its start time in seconds."""
        self._thread = threading.get_ident()
        self._node_owners: dict[int, NodeOwners] = {}
        """By thread: a device's backward, and the forwards that it recomputes, run in an autograd thread."""
        self._formulas: dict[Any, Formula | None] = {}
        self._composite: set[Any] = set()
        self._own_seconds = 0.0
        self._live: LiveBytes | None = None
        self._hooks: list[Any] = []
        self._eager: Any = None
        self._entered = self._suspended = False
        self._waits = not get_accelerator().is_synchronized_device()

    # Beginning and end ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Reset all counts and start counting. Compiled modules run eagerly until ``end``: fused kernels cannot be
        counted."""
        self.clear()
        for module in self.model.modules():
            vars(module)[_RECORD] = CountRecord()
        for module in self.modules:
            record = vars(module)[_RECORD]
            self._hooks += [
                module.register_forward_pre_hook(self._entering(record), prepend=True),
                module.register_forward_hook(self._leaving(record), always_call=True),
            ]
        self._live = LiveBytes(self.model)
        if "torch._dynamo" in sys.modules:
            self._eager = torch.compiler.set_stance("force_eager")
        load_dispatch()
        self._entered, self._suspended = True, False
        self.__enter__()

    def clear(self) -> None:
        self._running.clear()
        self._thread = threading.get_ident()
        self._node_owners = {self._thread: NodeOwners()}

    def end(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._suspended = True
        if self._live is not None:
            self._live.end()
            self._live = None
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        # Otherwise the caller is still inside another dispatch mode, entered since.
        if self._entered and modes and modes[-1] is self:
            self._entered = False
            self.__exit__(None, None, None)
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    # Modules --------------------------------------------------------------------------------------------------

    def _entering(self, record: CountRecord) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            if self._waits:
                synchronize_stream()
            if self._live is not None:
                self._live.enter()
            self._running.append((record, time.perf_counter() - self._own_seconds))
            self._record_owner(record)

        return enter

    def _leaving(self, record: CountRecord) -> Callable[..., None]:
        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            while self._running:
                running, began = self._running.pop()
                held, peak = self._live.leave() if self._live is not None and self._live.spans else (0, 0)
                if running is record:
                    break
            else:
                return
            if self._waits:
                synchronize_stream()
            if torch._C._current_graph_task_id() == NONE_RUNS:
                record.seconds += time.perf_counter() - self._own_seconds - began
                record.calls += 1
                record.held, record.peak = max(record.held, held), max(record.peak, peak)
            self._record_owner(self._running[-1][0] if self._running else None)

        return leave

    def _record_owner(self, record: CountRecord | None) -> None:
        if torch.is_grad_enabled():
            self._node_owners.setdefault(threading.get_ident(), NodeOwners()).note(record)

    def _node_owner(self) -> CountRecord | None:
        """Return the record of the module whose autograd node is being evaluated; None if it is not profiled."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        node_owners = self._node_owners.get(threading.get_ident())
        if node_owners is None or node_owners.task == torch._C._current_graph_task_id():
            # The node does not belong to a forward that was recomputed in this thread.
            node_owners = self._node_owners[self._thread]
        return node_owners.of(node)

    # Operations -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor will dispatch the operation on the local tensor
        began = time.perf_counter()
        kwargs = kwargs or {}
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = self._formula(func)
        if func in self._composite and not self._suspended:
            with self:
                return func.decompose(*args, **kwargs)
        called = time.perf_counter()
        out = func(*args, **kwargs)
        returned = time.perf_counter()
        if formula is not None and not self._suspended:
            self.count(formula(args, kwargs, out))
        if self._live is not None:
            self._live.see(out, (*args, *kwargs.values()))
        if not self._waits:
            self._own_seconds += called - began + time.perf_counter() - returned
        return out

    def _formula(self, func: Any) -> Formula | None:
        packet = getattr(func, "overloadpacket", func)
        formula = FORMULAS.get(packet.__name__)
        if formula is None and getattr(func, "_can_decompose", bool)():
            self._composite.add(func)
        self._formulas[func] = formula
        return formula

    def count(self, work: OpWork) -> None:
        """Add an operation's work to the record that it belongs to."""
        if torch._C._current_graph_task_id() == NONE_RUNS:
            if self._running:
                self._running[-1][0].forward.add(work)
            return
        if torch.is_grad_enabled() or self._running:
            record = self._running[-1][0] if self._running else self._node_owner()
            if record is not None:
                record.recomputed.add(work)
        elif (record := self._node_owner()) is not None:
            record.backward.add(work)

    def counted_as(self, work: OpWork, function: Callable[[], Any]) -> Any:
        """Call ``function``, and count ``work`` instead of its operations."""
        suspended, self._suspended = self._suspended, True
        try:
            return function()
        finally:
            self._suspended = suspended
            if not suspended:
                self.count(work)


def load_dispatch() -> None:
    """Trigger torch's imports at the first operation under a dispatch mode: their seconds must not count for a
    module."""

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Nothing():
        torch.empty(0)


def running_counter() -> OpCounter | None:
    """Return the innermost counter that is active in this thread, or None."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, OpCounter)), None)


# Live bytes during a profile: every storage that an operation allocates, until it is freed.
#
# Storages are tracked by weak references, so it does not matter whether the script, autograd or a module's output keeps
# them alive. On the meta device storages have sizes without memory: the numbers are the same.


@dataclass(slots=True)
class MemorySpan:
    """A running module: the live bytes when it began, and their maximum since."""

    base: int
    most: int


class LiveBytes:
    """Tracks live bytes of storages that the model's operations allocate; parameters, buffers and earlier tensors are
    not counted."""

    def __init__(self, model: nn.Module) -> None:
        self.now = 0
        self.spans: list[MemorySpan] = []
        self._known: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._follow(tensor, counted=False)

    def enter(self) -> None:
        self.spans.append(MemorySpan(self.now, self.now))

    def leave(self) -> tuple[int, int]:
        """Close the innermost span and return (bytes that it allocated and left alive, its peak bytes)."""
        span = self.spans.pop()
        if self.spans and span.most > self.spans[-1].most:
            self.spans[-1].most = span.most
        return max(0, self.now - span.base), span.most - span.base

    def see(self, made: Any, arguments: Iterable[Any]) -> None:
        """Track the storages of an operation's result ``made``; storages shared with its arguments are not counted."""
        for tensor in (made,) if isinstance(made, Tensor) else _tensors(made):
            key = _key(tensor)
            if key is None or key in self._known:
                continue
            others = any(_key(other) == key for other in _tensors(arguments))
            self._follow(tensor, counted=not others)
        if self.spans and self.now > self.spans[-1].most:
            self.spans[-1].most = self.now

    def _follow(self, tensor: Tensor, *, counted: bool) -> None:
        key = _key(tensor)
        if key is None:
            return
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes() if counted else 0

        def freed(_: Any, key: int = key, nbytes: int = nbytes) -> None:
            if self._known.pop(key, None) is not None:
                self.now -= nbytes

        self._known[key] = weakref.ref(storage, freed)
        self.now += nbytes

    def end(self) -> None:
        self._known.clear()


def _key(tensor: Tensor) -> int | None:
    """Return the key of the tensor's storage, valid while the storage lives; None if it has no storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


# Counts, summed over the module tree -----------------------------------------------------------------------------


def records_in(module: nn.Module) -> Iterator[CountRecord]:
    """Yield the records of the module and all its submodules, each once."""
    for inside in module.modules():
        record = record_of(inside)
        if record is not None:
            yield record


def total_work(module: nn.Module, kind: str) -> WorkCount:
    """Return the work of one kind (``CountRecord``: forward, backward, recomputed), including submodules."""
    amounts: list[WorkCount] = [getattr(record, kind) for record in records_in(module)]
    return WorkCount(sum(amount.macs for amount in amounts), sum(amount.flops for amount in amounts))


def get_module_flops(module: nn.Module) -> int:
    """Return the flops of the module's forward, including submodules; 0 if it is not profiled."""
    return total_work(module, "forward").flops


def get_module_macs(module: nn.Module) -> int:
    """Return the MACs of the module's forward, including submodules; 0 if it is not profiled."""
    return total_work(module, "forward").macs


def get_module_duration(module: nn.Module) -> float:
    """Return the seconds of the module's forward; for a module that is never called, such as a ModuleList, the sum of
    its children."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.seconds
    return sum((get_module_duration(child) for child in module.children()), 0.0)


def held_bytes(module: nn.Module) -> int:
    """Return the bytes that the module's forward allocated and left alive: outputs, and tensors saved for backward; for
    a module that is never called, the sum of its children."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.held
    return sum(held_bytes(child) for child in module.children())


def peak_bytes(module: nn.Module) -> int:
    """Return the peak bytes that the module's forward allocated; for a module that is never called, the largest of its
    children."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.peak
    return max((peak_bytes(child) for child in module.children()), default=0)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the module's parameters and buffers, each counted once; partitioned ones count in full."""
    weights = sum(full_numel(param) * param.element_size() for param in module.parameters())
    return weights + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


def params_of(module: nn.Module) -> int:
    """Return the number of the module's parameter elements, each parameter counted once; partitioned ones count in
    full."""
    return sum(full_numel(param) for param in module.parameters())


def average(model: nn.Module, passes: int) -> None:
    """Divide all counts and times by the number of counted passes."""
    if passes < 2:
        return
    for record in records_in(model):
        record.seconds /= passes
        for amount in (record.forward, record.backward, record.recomputed):
            amount.macs, amount.flops = round(amount.macs / passes), round(amount.flops / passes)


def by_class_and_depth(model: nn.Module) -> list[dict[str, tuple[int, int, float]]]:
    """Return, by depth of the tree: class name -> (parameters, MACs, seconds), summed over the modules of that
    class."""
    levels: list[dict[str, tuple[int, int, float]]] = []
    row = [model]
    while row:
        sums: dict[str, tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
        for module in row:
            params, macs, seconds = sums[type(module).__name__]
            sums[type(module).__name__] = (
                params + params_of(module),
                macs + get_module_macs(module),
                seconds + get_module_duration(module),
            )
        levels.append(dict(sums))
        row = [child for module in row for child in module.children()]
    return levels
