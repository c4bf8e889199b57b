"""A simulated step: the engine's own code for gathers and gradient buckets runs over buckets without memory.

``GradReducer``, ``GradBucket``, ``BufferPool``, ``ParamCoordinator`` and the gatherers are the real ones, built by the
same functions as in a run (``zero/gradients/factory.py``). Their allocations are counted instead of made: parameters
and gradients are meta tensors, other ranks answer immediately. A real backward pass through a chain of scalars gives
the order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.comm.pending import DONE
from deepspeed.comm.transports.exchanged_sums import SCRATCH_BYTES
from deepspeed.comm.transports.gloo import scratch_shape
from deepspeed.config.plan import Packing, ParamOffload
from deepspeed.planning.event_log import EventRecorder
from deepspeed.planning.ledger import MemoryKind, MemoryPhase
from deepspeed.planning.setting import RankSetting, SumScratch
from deepspeed.zero.accumulation import AccumulationClock
from deepspeed.zero.bucket import BufferPool
from deepspeed.zero.gathering.coordinator import Frame, ParamCoordinator
from deepspeed.zero.gathering.param_storage import ParamStorage
from deepspeed.zero.gathering.scheduled_gatherer import GatherChannel
from deepspeed.zero.gathering.shard_servers import ShardServers
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket, Status
from deepspeed.zero.gathering.sharded_model import GatherConnections, live_budget, make_gatherer
from deepspeed.zero.gradients.factory import make_grad_buckets, make_reducer
from deepspeed.zero.gradients.reducer import GradReducer
from deepspeed.zero.layout import BucketLayout
from deepspeed.zero.replica_groups import ReplicaGroup, expert_parallel_size
from deepspeed.zero.states.store import ResidentTier

META = torch.device("meta")
HERE = torch.device("cpu")
"""Device for messages to other ranks, whose contents matter."""

STEPS = 3
"""Steps until the state is steady: the first creates buffers, the second reuses them and the recorded gather order."""


class Meter:
    """Bytes in use by kind, and for each phase their values at the peak of the sum.

    Gradients that have not reached their bucket are counted separately, since they depend on autograd: ``most`` is the
    peak including them.
    """

    def __init__(self) -> None:
        self.now: Counter[MemoryKind] = Counter()
        self.peaks: dict[MemoryPhase, Counter[MemoryKind]] = {}
        self.arriving = 0
        self.most: Counter[MemoryPhase] = Counter()
        self._phases: tuple[MemoryPhase, ...] = ()

    def enter(self, *phases: MemoryPhase) -> None:
        self._phases = phases
        self._look()

    def change(self, kind: MemoryKind, nbytes: int) -> None:
        self.now[kind] += nbytes
        if nbytes > 0:
            self._look()

    def pass_through(self, kind: MemoryKind, nbytes: int) -> None:
        """Count memory that is freed at once."""
        self.change(kind, nbytes)
        self.change(kind, -nbytes)

    def arrive(self, nbytes: int) -> None:
        self.arriving += nbytes
        if nbytes > 0:
            self._look()

    def by_phase(self) -> dict[MemoryPhase, Counter[MemoryKind]]:
        """Return the peaks by phase, including gradients that have not reached their bucket."""
        return {
            phase: kinds + Counter({MemoryKind.ARRIVING: self.most[phase] - kinds.total()})
            for phase, kinds in self.peaks.items()
        }

    def _look(self) -> None:
        total = self.now.total()
        for phase in self._phases:
            self.most[phase] = max(self.most[phase], total + self.arriving)
            if phase not in self.peaks or total > self.peaks[phase].total():
                self.peaks[phase] = self.now.copy()


class SimulatedPool(BufferPool):
    """The real pool, with its bytes metered."""

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

    def sizes(self) -> dict[Any, list[int]]:
        """Return the elements of the free buffers by key, in the order in which they are taken."""
        return {key: [buffer.numel() for buffer in buffers] for key, buffers in self._free.items()}

    def _count(self) -> None:
        free = [buffer for buffers in self._free.values() for buffer in buffers]
        held = sum(t.numel() * t.element_size() for t in [*self._out.values(), *free])
        self.meter.change(MemoryKind.BUCKETS, held - self.meter.now[MemoryKind.BUCKETS])


class SimulatedCommunicator(Communicator):
    """A communicator whose peers answer immediately. ``stride``: between the ranks."""

    def __init__(
        self,
        size: int,
        meter: Meter,
        log: EventRecorder,
        *,
        scratch: SumScratch = SumScratch.NONE,
        stride: int = 1,
    ) -> None:
        super().__init__(None)
        self.size, self.ranks = size, tuple(range(size))
        self.meter = meter
        self.log = log
        self.stride = stride
        self.scratch = scratch if size > 1 else SumScratch.NONE

    def _record(self, operation: str, nbytes: int) -> Pending:
        return self.log.collective(operation, nbytes, self.size, self.stride) if self.size > 1 else DONE

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        return self._sum("reduce_scatter", input)

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        return self._sum("all_reduce", tensor)

    def _sum(self, operation: str, tensor: Tensor) -> Pending:
        if self.scratch is SumScratch.MESSAGES:
            return self._received(tensor, self._record(operation, tensor.nbytes))
        if self.scratch is SumScratch.EXCHANGED and tensor.element_size() < 4:
            self._exchanged(tensor)
        return self._record(operation, tensor.nbytes)

    def _exchanged(self, tensor: Tensor) -> None:
        """Count the buffers of a sum whose 16-bit inputs are exchanged and summed in fp32, piece by piece; they are
        free before the next sum."""
        received = min(tensor.nbytes, SCRATCH_BYTES)
        sent = received if tensor.nbytes > SCRATCH_BYTES else 0  # a single piece is sent in place
        total = received // tensor.element_size() // self.size * 4
        self.meter.pass_through(MemoryKind.COMMUNICATION, sent + received + total)

    def _received(self, tensor: Tensor, announced: Pending) -> Pending:
        """Count the buffers that receive this rank's shard from its peers, from the start of the sum until its wait."""
        count, item = -(-tensor.numel() // self.size), tensor.element_size()
        nbytes = math.prod(scratch_shape(count, self.size, item)) * item
        self.meter.change(MemoryKind.COMMUNICATION, nbytes)

        def finish() -> None:
            announced.wait()
            self.meter.change(MemoryKind.COMMUNICATION, -nbytes)

        return Pending(finish)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        return self._record("all_reduce", tensor.nbytes)

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        return self._record("all_gather", input.nbytes * self.size)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
    ) -> Pending:
        """Count the payloads that are sent and received."""
        self.meter.pass_through(MemoryKind.COMMUNICATION, input.nbytes + output.nbytes)
        return self._record("all_to_all", input.nbytes)

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        return self._record("broadcast", tensor.nbytes)


class SimulatedChannel(SimulatedCommunicator):
    """The communicator of a bucket's gather: takes the bytes from the layout, since the shard has no memory."""

    def __init__(self, bucket: ShardedBucket, near: SimulatedCommunicator) -> None:
        super().__init__(near.size, near.meter, near.log, stride=near.stride)
        self.bucket = bucket

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        return self._record("all_gather", self.bucket.nbytes)


class SimulatedReplicaGroups:
    """The replica groups of rank 0."""

    def __init__(self, setting: RankSetting, meter: Meter, log: EventRecorder) -> None:
        self.setting, self.meter, self.log = setting, meter, log
        self.all_ranks = SimulatedCommunicator(setting.ranks, meter, log)
        self.near: dict[str, SimulatedCommunicator] = {}
        """By replica group: the communicator in which gathers run."""
        self._known = {
            name: self._replica_group(name, size) for name, size in setting.shards_by_group.items()
        }

    def _replica_group(self, name: str, shards: int) -> ReplicaGroup:
        """Build a replica group of which ``shards`` ranks share one copy."""
        ranks, group = self.setting.ranks, self.setting.plan.packing.group
        stride = expert_parallel_size(name, ranks)  # experts are spread over neighbours
        holders, scratch = ranks // stride, self.setting.sum_scratch
        whole, shard, replicas = (
            SimulatedCommunicator(size, self.meter, self.log, scratch=scratch, stride=stride * steps)
            for size, steps in ((holders, 1), (shards, 1), (holders // shards, shards))
        )
        self.near[name] = shard
        if in_groups(shards, group):
            self.near[name] = SimulatedCommunicator(group, self.meter, self.log, stride=stride)
        return ReplicaGroup(name, whole, shard, replicas, divisor=ranks)

    def __getitem__(self, name: str) -> ReplicaGroup:
        return self._known[name]


def in_groups(shards: int, group: int) -> bool:
    """Tell whether ``shards`` ranks divide into several groups of ``group`` > 1 ranks (``ReplicaGroup.grouped``)."""
    return 1 < group < shards and shards % group == 0


class SimulatedBucket(ShardedBucket):
    """A bucket whose gather and reshard only change counted bytes."""

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[nn.Parameter],
        communicator: Communicator,
        meter: Meter,
        *,
        persistent: bool,
    ) -> None:
        super().__init__(layout, params, communicator, persistent=persistent)
        self.meter = meter
        self.status = Status.GATHERED if persistent else Status.SHARDED
        self.device = HERE
        self.nothing = self.full = self.shard = torch.empty(0)

    def allocate(self) -> Tensor:
        self.meter.change(MemoryKind.GATHERED, self.nbytes)
        self.status = Status.GATHERING
        return self.nothing

    def arrived(self) -> None:
        self.status = Status.GATHERED

    def reshard(self) -> None:
        if self.status is Status.GATHERED:
            self.meter.change(MemoryKind.GATHERED, -self.nbytes)
            self.status = Status.SHARDED

    def device_shard(self) -> Tensor:
        return self.nothing


class SimulatedServers(ShardServers):
    """Shard servers that deliver other ranks' shards immediately."""

    def __init__(self, buckets: Sequence[ShardedBucket], replica_groups: SimulatedReplicaGroups) -> None:
        self.buckets, self.servers = list(buckets), {}
        self.replica_groups = replica_groups

    def fetch(self, index: int, full: Tensor, phase: object) -> None:
        bucket = self.buckets[index]
        near = self.replica_groups.near[bucket.layout.replica_group]
        if near.size > 1:
            near.log.collective("fetch", bucket.nbytes, near.size, near.stride).wait()


class SimulatedConnections(GatherConnections):
    """Gather connections over simulated servers and channels."""

    def __init__(self, replica_groups: SimulatedReplicaGroups) -> None:
        super().__init__(replica_groups, Packing())
        self.simulated = replica_groups

    def server(self, buckets: Sequence[ShardedBucket]) -> ShardServers:
        return SimulatedServers(buckets, self.simulated)

    def channels(self, buckets: Sequence[ShardedBucket], server: ShardServers) -> list[GatherChannel]:
        return [
            SimulatedChannel(bucket, self.simulated.near[bucket.layout.replica_group]) for bucket in buckets
        ]


class SimulatedStorage(ParamStorage):
    """Parameter storage whose reads do nothing."""

    def __init__(self, plan: ParamOffload | None) -> None:
        super().__init__(None)
        self.plan = plan

    @property
    def on_file(self) -> bool:
        return self.plan is not None and self.plan.folder is not None

    def read(self, buckets: Sequence[ShardedBucket], index: int, full: Tensor) -> Callable[[], None]:
        return lambda: None


class Rehearsal:
    """A few simulated optimizer steps of rank 0."""

    def __init__(self, setting: RankSetting) -> None:
        self.setting = setting
        self.meter, self.log = Meter(), EventRecorder()
        self.replica_groups = SimulatedReplicaGroups(setting, self.meter, self.log)
        self.params = self._params()
        self.buckets = [
            SimulatedBucket(
                bucket.layout,
                self.params,
                self.replica_groups[bucket.layout.replica_group].shard,
                self.meter,
                persistent=bucket.persistent,
            )
            for bucket in setting.buckets
        ]
        self.coordinator = self._coordinator() if setting.plan.zero.shard_params else None
        self.clock = AccumulationClock(min(setting.micro_batches, 2))  # the first stands for all but the last
        self.pool = SimulatedPool(self.meter)
        self.reducer = self._reducer()
        self.arrivals = GradientArrivals(self.reducer, self.params, setting.model.calls, self.meter)
        self.needs = self._needs()

    def run(self) -> None:
        """Rehearse steps until the state is steady."""
        found: Any = None
        for step in range(STEPS):
            self._step(step)
            left = self.pool.sizes()
            if self.coordinator is None and left == found:
                break  # steady: without a coordinator, only the pool carries state between steps
            found = left

    def _step(self, step: int) -> None:
        """Run the step's micro-batches, and reshard gathered parameters as the update does."""
        self.log.begin_step()
        for _ in range(self.clock.steps):
            self.log.begin_micro_batch()
            self.meter.enter(MemoryPhase.FORWARD)
            last = self._forward()
            self.meter.enter(MemoryPhase.BACKWARD)
            self.reducer.before_backward()
            last.backward()
            self.reducer.flush()
            self.clock.tick()
        self.meter.enter(MemoryPhase.STEP if step else MemoryPhase.FIRST_UPDATE)
        if self.coordinator is not None:
            self.coordinator.gatherer.end_of_step()
            for bucket in self.buckets:
                if not bucket.persistent:
                    bucket.reshard()
            self.coordinator.end_of_step()
        self.reducer.clear()

    def _params(self) -> list[nn.Parameter]:
        """Return one meta parameter per parameter index."""
        layouts = [bucket.layout for bucket in self.setting.buckets]
        slots = {slot.param: (slot.numel, layout.dtype) for layout in layouts for slot in layout.slots}
        return [
            nn.Parameter(torch.empty(numel, dtype=dtype, device=META), requires_grad=dtype.is_floating_point)
            for numel, dtype in (slots.get(i, (0, torch.float32)) for i in range(max(slots, default=-1) + 1))
        ]

    def _coordinator(self) -> ParamCoordinator:
        zero = self.setting.zero
        gatherer = make_gatherer(
            self.buckets,
            SimulatedConnections(self.replica_groups),
            SimulatedStorage(self.setting.plan.param_offload),
            device=META if self.setting.has_device_memory else HERE,
            prefetch_numel=int(zero.prefetch_bucket_size),
        )
        return ParamCoordinator(self.buckets, gatherer, live_budget(zero))

    def _reducer(self) -> GradReducer:
        """Build the reducer. Sparse (row) sums are planned as dense ones, the worst case."""
        plan, both = self.setting.plan, zip(self.buckets, self.setting.buckets, strict=True)
        grads = make_grad_buckets(
            [bucket for bucket, use in both if use.trained],
            plan,
            self.replica_groups,
            pool=self.pool,
            tier=ResidentTier(),
        )
        return make_reducer(
            self.params,
            grads,
            plan,
            self.replica_groups.all_ranks,
            self.coordinator,
            at_boundary=lambda: self.clock.at_boundary,
            device=HERE,
        )

    def _needs(self) -> list[list[int]]:
        """Return, by call, the indices of the non-persistent buckets that it needs whole."""
        place = {slot.param: b for b, bucket in enumerate(self.buckets) for slot in bucket.layout.slots}
        calls = self.setting.model.calls
        found = [list(dict.fromkeys(place[i] for i in call if i in place)) for call in calls]
        return [[b for b in needs if not self.buckets[b].persistent] for needs in found]

    def _forward(self) -> Tensor:
        """Build a chain of scalars, one link per call, whose hooks act in backward like those of a model."""
        link = torch.zeros((), requires_grad=True)
        for call, buckets in enumerate(self.needs):
            frame: Frame | None = None
            if self.coordinator is not None:
                self.coordinator.enter(list(buckets))
            self.log.compute(MemoryPhase.FORWARD, call)
            link = link * 1.0
            if self.coordinator is not None:
                frame = self.coordinator.leave()
            link.register_hook(partial(self._backward, frame, call))
        return link

    def _backward(self, frame: Frame | None, call: int, _: Tensor) -> None:
        if self.coordinator is not None and frame is not None and frame.held:
            self.coordinator.backward(frame)
        self.log.compute(MemoryPhase.BACKWARD, call)
        self.arrivals.deliver(call)


def rehearse(setting: RankSetting) -> tuple[dict[MemoryPhase, Counter[MemoryKind]], EventRecorder]:
    """Rehearse a steady step of the setting. Returns, by phase, the peak of temporary bytes by kind, and the events of
    the step."""
    with torch.inference_mode(False), torch.enable_grad():
        rehearsal = Rehearsal(setting)
        rehearsal.run()
    return rehearsal.meter.by_phase(), rehearsal.log


class GradientArrivals:
    """Delivers gradients as backward traverses the calls. The gradient of a parameter with several uses accumulates
    inside autograd until backward reaches its first use; adding two briefly takes three buffers: both and their sum."""

    def __init__(
        self,
        reducer: GradReducer,
        params: Sequence[nn.Parameter],
        calls: Sequence[Sequence[int]],
        meter: Meter,
    ) -> None:
        self.reducer = reducer
        self.params = params
        self.meter = meter
        known = {slot.param for bucket in reducer.buckets for slot in bucket.layout.slots}
        self.uses = [[i for i in dict.fromkeys(call) if i in known] for call in calls]
        self.firsts: list[set[int]] = []
        """By call, the parameters whose first use it is."""
        seen: set[int] = set()
        for uses in self.uses:
            self.firsts.append(set(uses) - seen)
            seen.update(uses)
        self.waiting: set[int] = set()
        self.grads: dict[int, Tensor] = {}
        """Gradients by parameter: they have no memory, so each is reused."""

    def deliver(self, call: int) -> None:
        for index in reversed(self.uses[call]):
            param = self.params[index]
            nbytes = param.shape[0] * param.dtype.itemsize
            again = index in self.waiting
            self.meter.arrive(2 * nbytes if again else nbytes)
            if index in self.firsts[call]:
                param.grad = self._grad(index)
                self.reducer.ready(index, param)
                self.meter.arrive(-3 * nbytes if again else -nbytes)
                self.waiting.discard(index)
            elif again:
                self.meter.arrive(-2 * nbytes)
            else:
                self.waiting.add(index)

    def _grad(self, index: int) -> Tensor:
        if index not in self.grads:
            self.grads[index] = self.params[index].detach()  # `empty_like` takes a hundred times as long
        return self.grads[index]
