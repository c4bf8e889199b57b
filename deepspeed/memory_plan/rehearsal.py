"""A simulated step: the engine's own code for gathers and gradient buckets runs over buckets without memory.

``GradReducer``, ``GradBucket``, ``BufferPool``, ``ParamCoordinator`` and the gatherers are the real ones. What they
would allocate is counted instead: gradients are meta tensors, parameters are numbers, other ranks answer immediately.
The order is that of a real backward pass, through a chain of scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Pending
from deepspeed.comm.native_sums import SCRATCH_BYTES
from deepspeed.config.plan import Cadence, Plan
from deepspeed.memory_plan.ledger import Kind, Phase
from deepspeed.runtime.zero.buffer_pool import BufferPool
from deepspeed.runtime.zero.gathering.coordinator import Frame, LiveBudget, ParamCoordinator
from deepspeed.runtime.zero.gathering.gather import FetchingGather, LocalGather, ReadingGather
from deepspeed.runtime.zero.gathering.scheduled_gather import ScheduledGather
from deepspeed.runtime.zero.gathering.sharded_bucket import Status
from deepspeed.runtime.zero.grad_bucket import GradBucket
from deepspeed.runtime.zero.gradient_sums import DenseSum
from deepspeed.runtime.zero.layout import BucketLayout
from deepspeed.runtime.zero.offload.tiers import ResidentTier
from deepspeed.runtime.zero.reducer import GradReducer

META = torch.device("meta")

STEPS = 3
"""The first makes buffers, the second finds them and the order of gathers, after the third nothing changes any more."""


class Meter:
    """Bytes in use by kind, and for each phase their values when their sum was largest.

    Gradients that have not reached their bucket depend on autograd: ``most`` is the largest sum including them.
    """

    def __init__(self) -> None:
        self.now: Counter[Kind] = Counter()
        self.peaks: dict[Phase, Counter[Kind]] = {}
        self.arriving = 0
        self.most: Counter[Phase] = Counter()
        self._phases: tuple[Phase, ...] = ()

    def enter(self, *phases: Phase) -> None:
        self._phases = phases
        self._look()

    def change(self, kind: Kind, nbytes: int) -> None:
        self.now[kind] += nbytes
        if nbytes > 0:
            self._look()

    def arrive(self, nbytes: int) -> None:
        self.arriving += nbytes
        if nbytes > 0:
            self._look()

    def by_phase(self) -> dict[Phase, Counter[Kind]]:
        """The peaks, including what arriving gradients add to them."""
        return {
            phase: kinds + Counter({Kind.ARRIVING: self.most[phase] - kinds.total()})
            for phase, kinds in self.peaks.items()
        }

    def _look(self) -> None:
        total = self.now.total()
        for phase in self._phases:
            self.most[phase] = max(self.most[phase], total + self.arriving)
            if phase not in self.peaks or total > self.peaks[phase].total():
                self.peaks[phase] = self.now.copy()


class PaperPool(BufferPool):
    """The real pool, counted."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self._out: dict[int, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = super().take(numel, dtype, device)
        whole = buffer if buffer._base is None else buffer._base
        self._out[id(whole)] = whole
        self._count()
        return buffer

    def give(self, buffer: Tensor, read_until: Any = None) -> None:
        whole = buffer if buffer._base is None else buffer._base
        self._out.pop(id(whole), None)
        super().give(buffer, read_until)
        self._count()

    def _count(self) -> None:
        free = [buffer for buffers in self._free.values() for buffer in buffers]
        held = sum(t.numel() * t.element_size() for t in [*self._out.values(), *free])
        self.meter.change(Kind.BUCKETS, held - self.meter.now[Kind.BUCKETS])


class PaperCommunicator:
    """Other ranks that answer immediately. ``native``: a device's collectives need their own buffers."""

    def __init__(self, size: int, meter: Meter, *, native: bool) -> None:
        self.size, self.rank, self.ranks = size, 0, tuple(range(size))
        self.meter = meter
        self.native = native
        self.bytes_sent = 0
        self.collectives: Counter[str] = Counter()

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        """16-bit inputs are exchanged and summed in fp32, piece by piece (``comm/native_sums.py``)."""
        if not self.native or input.element_size() >= 4:
            return Pending()
        whole = input.numel() * input.element_size()
        received = min(whole, SCRATCH_BYTES)
        sent = received if whole > SCRATCH_BYTES else 0  # a single piece is sent from where it is
        total = received // input.element_size() // self.size * 4
        self.meter.change(Kind.COMMUNICATION, sent + received + total)
        self.meter.change(Kind.COMMUNICATION, -sent - received - total)
        return Pending()

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        return self.reduce_scatter(tensor[: -(-tensor.numel() // self.size)], tensor)

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        return Pending()

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        return Pending()


class _Reducer(GradReducer):
    """The real reducer; its messages to other ranks must be readable."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class PaperBucket:
    """A bucket of parameters that is gathered and released without memory."""

    def __init__(
        self, layout: BucketLayout, persistent: bool, meter: Meter, communicator: PaperCommunicator
    ) -> None:
        self.layout = layout
        self.communicator = communicator
        self.persistent = persistent
        self.meter = meter
        self.status = Status.GATHERED if persistent else Status.SHARDED
        self.device = torch.device("cpu")
        self.full = self.shard = torch.empty(0)
        self.nbytes = layout.padded_numel * layout.dtype.itemsize

    def allocate(self) -> Tensor:
        self.meter.change(Kind.GATHERED, self.nbytes)
        self.status = Status.GATHERING
        return self.full

    def arrived(self) -> None:
        self.status = Status.GATHERED

    def release(self) -> None:
        if self.status is Status.GATHERED:
            self.meter.change(Kind.GATHERED, -self.nbytes)
            self.status = Status.SHARDED

    def own_slice(self) -> Tensor:
        return self.shard


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRules:
    """Stage 3: how slices are gathered (``make_gatherer`` in ``zero/gathering/sharded_model.py``)."""

    budget: LiveBudget
    prefetch_numel: int
    read_ahead: tuple[int, int] | None
    """Buckets and their largest size in elements, where slices are read from storage."""


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """A few optimizer steps; ``run`` returns by phase the peak of memory in use beyond what persists.

    Args:
        layouts: all buckets; ``persistent`` and ``trained`` say which are which.
        calls: parameters (slot numbers) by call of forward.
        ranks: those that share one copy; ``everyone``: those with its replicas.
        apart: whether the device has its own memory.
    """

    layouts: Sequence[BucketLayout]
    persistent: Sequence[bool]
    trained: Sequence[bool]
    calls: Sequence[Sequence[int]]
    plan: Plan
    ranks: int
    everyone: int
    micro_batches: int
    apart: bool
    gathers: GatherRules | None
    meter: Meter = field(default_factory=Meter)

    def run(self) -> dict[Phase, Counter[Kind]]:
        others = PaperCommunicator(self.ranks, self.meter, native=False)
        buckets = [
            PaperBucket(layout, persistent, self.meter, others)
            for layout, persistent in zip(self.layouts, self.persistent, strict=True)
        ]
        gatherer = self._gatherer(buckets)
        coordinator = None
        if gatherer is not None and self.gathers is not None:
            coordinator = ParamCoordinator(buckets, gatherer, self.gathers.budget)  # type: ignore[arg-type]
        boundary = [False]
        reducer, params = self._reducer(coordinator, boundary)
        if isinstance(gatherer, ScheduledGather):
            reducer.turns, gatherer.start_sum = gatherer, reducer.launch
        needs = self._needs(buckets)
        known = {slot.param for bucket in reducer.buckets for slot in bucket.layout.slots}
        arrive = Arrivals(reducer, params, self.calls, known, self.meter)
        micro_batches = min(self.micro_batches, 2)  # one before the boundary is representative of the others
        with torch.inference_mode(False), torch.enable_grad():
            for step in range(STEPS):
                for micro in range(micro_batches):
                    boundary[0] = micro == micro_batches - 1
                    self._enter(step, Phase.FORWARD)
                    last = self._forward(coordinator, needs, arrive)
                    self._enter(step, Phase.BACKWARD)
                    reducer.before_backward()
                    last.backward()
                    reducer.flush()
                self._enter(step, Phase.STEP)
                if coordinator is not None and gatherer is not None:
                    gatherer.end_of_step()
                    for bucket in buckets:
                        if not bucket.persistent:
                            bucket.release()
                    coordinator.end_of_step()
                reducer.clear()
        return self.meter.by_phase()

    def _enter(self, step: int, phase: Phase) -> None:
        self.meter.enter(Phase.FIRST_UPDATE if step == 0 and phase is Phase.STEP else phase)

    def _gatherer(self, buckets: Sequence[Any]) -> LocalGather | None:
        rules = self.gathers
        if rules is None:
            return None
        if self.ranks == 1 and rules.read_ahead is not None and not self.apart:
            ahead, most = rules.read_ahead
            return ReadingGather(buckets, lambda index, full: lambda: None, ahead=ahead, max_numel=most)
        if self.ranks == 1:
            return LocalGather(buckets)
        others: Any = PaperCommunicator(self.ranks, self.meter, native=False)
        server: Any = SimpleNamespace(fetch=lambda index, full: None, advance=lambda: None)
        if self.apart:
            channels: Any = {layout.scope: others for layout in self.layouts}
            return ScheduledGather(
                buckets, channels, server, prefetch_numel=rules.prefetch_numel, everyone=others
            )
        return FetchingGather(buckets, server)

    def _reducer(
        self, coordinator: ParamCoordinator | None, boundary: list[bool]
    ) -> tuple[GradReducer, list[Any]]:
        """The real reducer over buckets of meta tensors, and stand-ins for the parameters."""
        plan, pool = self.plan, PaperPool(self.meter)
        others: Any = PaperCommunicator(self.ranks, self.meter, native=self.apart and self.ranks > 1)
        trained = [layout for layout, known in zip(self.layouts, self.trained, strict=True) if known]
        buckets = [
            GradBucket(
                layout,
                DenseSum(layout, others, pool, scatter=plan.zero.reduce_scatter),
                pool,
                META,
                rank=0,
                accumulate_dtype=plan.precision.accumulate or layout.dtype,
                keep_local=not plan.zero.shard_grads,
                new_slice=partial(ResidentTier().new_gradients, device=META),
            )
            for layout in trained
        ]
        slots = {slot.param: (slot.numel, layout.dtype) for layout in trained for slot in layout.slots}
        params: list[Any] = [
            SimpleNamespace(grad=None, shape=(numel,), dtype=dtype)
            for numel, dtype in (slots.get(i, (0, None)) for i in range(max(slots, default=-1) + 1))
        ]
        cadence = plan.zero.cadence
        if coordinator is not None:
            cadence = Cadence.AT_BOUNDARY if coordinator.keeps_all else Cadence.EVERY_MICRO_BATCH
        everyone: Any = PaperCommunicator(self.everyone, self.meter, native=False)
        reducer = _Reducer(
            params,
            buckets,
            everyone,
            cadence=cadence,
            overlap=plan.zero.overlap,
            expose=not plan.zero.shard_state,
            at_boundary=lambda: boundary[0],
        )
        return reducer, params

    def _needs(self, buckets: Sequence[PaperBucket]) -> list[list[int]]:
        """By call: the buckets that have to be whole."""
        place = {slot.param: b for b, bucket in enumerate(buckets) for slot in bucket.layout.slots}
        found = [list(dict.fromkeys(place[i] for i in call if i in place)) for call in self.calls]
        return [[b for b in needs if not buckets[b].persistent] for needs in found]

    @staticmethod
    def _forward(coordinator: ParamCoordinator | None, needs: Sequence[list[int]], arrive: Any) -> Tensor:
        """A chain of scalars, one link per call; backward through it acts like the hooks in a model."""
        link = torch.zeros((), requires_grad=True)
        for call, buckets in enumerate(needs):
            frame: Frame | None = None
            if coordinator is not None:
                coordinator.enter(list(buckets))
            link = link * 1.0
            if coordinator is not None:
                frame = coordinator.leave()
            link.register_hook(partial(_reached, coordinator, frame, arrive, call))
        return link


def _reached(
    coordinator: ParamCoordinator | None, frame: Frame | None, arrive: Any, call: int, _: Tensor
) -> None:
    if coordinator is not None and frame is not None and frame.held:
        coordinator.backward(frame)
    arrive(call)


class Arrivals:
    """Gradients as backward traverses the calls. That of a parameter with several uses waits inside autograd until the
    first of them; where two meet there are briefly three: one from each use, and their sum."""

    def __init__(
        self,
        reducer: GradReducer,
        params: Sequence[Any],
        calls: Sequence[Sequence[int]],
        known: set[int],
        meter: Meter,
    ) -> None:
        self.reducer = reducer
        self.params = params
        self.uses = [[i for i in dict.fromkeys(call) if i in known] for call in calls]
        self.firsts = _first_uses(calls, known)
        self.meter = meter
        self.waiting: set[int] = set()

    def __call__(self, call: int) -> None:
        for index in reversed(self.uses[call]):
            param = self.params[index]
            nbytes = param.shape[0] * param.dtype.itemsize
            again = index in self.waiting
            self.meter.arrive(2 * nbytes if again else nbytes)
            if index in self.firsts[call]:
                param.grad = torch.empty(param.shape, dtype=param.dtype, device=META)
                self.reducer.ready(index, param)
                self.meter.arrive(-3 * nbytes if again else -nbytes)
                self.waiting.discard(index)
            elif again:
                self.meter.arrive(-2 * nbytes)
            else:
                self.waiting.add(index)


def _first_uses(calls: Sequence[Sequence[int]], known: set[int]) -> list[list[int]]:
    """By call: the parameters in ``known`` that it is the first to use."""
    seen: set[int] = set()
    result: list[list[int]] = []
    for call in calls:
        new = [i for i in dict.fromkeys(call) if i in known and i not in seen]
        seen.update(new)
        result.append(new)
    return result
