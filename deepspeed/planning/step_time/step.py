"""Simulation of a step: a rank's program, the durations of its parts, and the links that ranks share.

A program is a list of micro-batches, each a list of events of the training thread: it computes a call, starts a
collective, or waits for one. It is recorded in a rehearsal of the engine's own code (``planning/rehearsal.py``), which
thus decides on the order of gathers, the filling of buckets, the sums in flight and the waits; none of it is modelled
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed.config.plan import Plan
from deepspeed.ops.formats.codecs import codec_named
from deepspeed.planning.event_log import CollectiveStart, CollectiveWait, ComputeCall
from deepspeed.planning.ledger import MemoryPhase
from deepspeed.planning.link_time import bytes_per_element
from deepspeed.planning.planner import PlanSetting
from deepspeed.planning.rehearsal import in_groups
from deepspeed.planning.setting import BucketUse
from deepspeed.planning.step_time.events import Link, Schedule, Task, simulate
from deepspeed.planning.step_time.fabric import BETWEEN, INSIDE, Fabric, RankGroup, Transmission
from deepspeed.planning.step_time.hardware import Device
from deepspeed.planning.step_time.work import PlannedExchange, StepWork
from deepspeed.zero.replica_groups import expert_parallel_size

COMPUTE, HOST, HOST_LINK, STORAGE = "compute", "host", "host link", "storage"
IN_WORDS = {
    BETWEEN: "links between nodes",
    INSIDE: "links inside a node",
    HOST: "the host's update",
    HOST_LINK: "copies to host memory",
}
SMALL_MESSAGE = 64 * 1024
GATHERS = ("all_gather", "fetch")
STATE_BYTES = 12.0
"""Bytes per element on storage: master and two moments, in fp32."""


@dataclass(frozen=True, slots=True)
class OptimizerUpdate:
    """The optimizer's update of ``elements`` elements."""

    elements: int


Event = ComputeCall | CollectiveStart | CollectiveWait | OptimizerUpdate


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Events of a step. ``micro_batches``: those of each micro-batch; ``update``: those of the optimizer step."""

    micro_batches: Sequence[Sequence[Event]]
    update: Sequence[Event]

    @property
    def events(self) -> list[Event]:
        return [event for part in (*self.micro_batches, self.update) for event in part]


def program_of(setting: PlanSetting, micro_batches: int | None = None) -> StepProgram:
    """Return the events of a steady step of rank 0. Of several micro-batches, all but the last are alike.

    ``micro_batches``: overrides the number in ``setting``.
    """
    count = setting.micro_batches if micro_batches is None else micro_batches
    if (count > 1) != (setting.micro_batches > 1):  # a single one is both first and last: rehearse again
        setting = replace(setting, micro_batches=count)
    _, recorder = setting.rehearsed
    first, last = recorder.parts[0], recorder.parts[-1]
    return StepProgram([first] * (count - 1) + [last], _update(setting, setting.buckets, recorder.started))


def _update(setting: PlanSetting, buckets: Sequence[BucketUse], number: int) -> list[Event]:
    """Return the events of the update: the vote's all-reduce (norm, used parameters), the optimizer, the gathers of new
    weights."""
    begun: list[CollectiveStart] = []
    if setting.ranks > 1:
        begun.append(CollectiveStart(number, "all_reduce", 8.0 * (2 + setting.model.trained), setting.ranks))
    updated = [bucket.layout for bucket in buckets if bucket.trained]
    elements = sum(fragment.numel for layout in updated for fragment in layout.owned(0))
    for bucket in buckets:
        published = _published(setting, bucket)
        if published is not None:
            operation, nbytes, ranks, stride = published
            begun.append(CollectiveStart(number + len(begun), operation, nbytes, ranks, stride))
    agreed = [event for event in begun if event.operation == "all_reduce"]
    gathers = begun[len(agreed) :]
    return [
        *(event for start in agreed for event in (start, CollectiveWait(start.number))),
        OptimizerUpdate(elements),
        *gathers,
        *(CollectiveWait(start.number) for start in gathers),
    ]


def _published(setting: PlanSetting, bucket: BucketUse) -> tuple[str, float, int, int] | None:
    """Return (operation, bytes, ranks, stride) of the bucket's gather after an update, or None: of weights that are
    whole on every rank, or of shards across the groups that each hold a copy (``zero/gathering/gather_pieces.py``).
    """
    layout, group = bucket.layout, setting.plan.packing.group
    if layout.num_shards == 1:
        return None
    stride = expert_parallel_size(layout.replica_group, setting.ranks)
    if setting.plan.zero.shard_params and not bucket.persistent:
        if not in_groups(layout.num_shards, group):
            return None
        across = layout.num_shards // group
        return (
            "all_gather",
            float(layout.padded_numel * layout.dtype.itemsize / group),
            across,
            stride * group,
        )
    if not bucket.trained:
        return None
    return "all_gather", float(layout.padded_numel * layout.dtype.itemsize), layout.num_shards, stride


# Its simulation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step. ``seconds``: in total; ``compute``: of them, the rank computes; ``waits_for``: resource that
    dominates the rest."""

    seconds: float
    compute: float
    waits_for: str = ""

    @property
    def exposed(self) -> float:
        """Seconds of waiting that do not overlap with compute."""
        return max(0.0, self.seconds - self.compute)

    @property
    def reason(self) -> str:
        """The dominant cause of waiting in words; "" if at most 1% of the step is waiting."""
        return IN_WORDS.get(self.waits_for, self.waits_for) if self.exposed > 0.01 * self.seconds else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMachine:
    """Hardware that a step runs on. ``device``: None for CPU ranks, which have no separate host memory to copy to."""

    fabric: Fabric
    device: Device | None = None


def step_time(setting: PlanSetting, work: StepWork, machine: StepMachine, model_ranks: int = 1) -> StepTime:
    """Simulate a steady step of rank 0. ``model_ranks``: model-parallel neighbours; the data-parallel ranks of
    ``setting`` are that far apart."""
    return run(program_of(setting), setting, work, machine, model_ranks)


def run(
    program: StepProgram, setting: PlanSetting, work: StepWork, machine: StepMachine, model_ranks: int = 1
) -> StepTime:
    schedule = schedule_of(program.events, setting, work, machine, model_ranks)
    return StepTime(schedule.makespan, schedule.busy(COMPUTE), waits_for(schedule))


def schedule_of(
    events: Sequence[Event], setting: PlanSetting, work: StepWork, machine: StepMachine, model_ranks: int = 1
) -> Schedule:
    """Schedule the events of a step that follows another one: links with a burst begin with what the previous step has
    left."""
    builder = Builder(setting, work, machine, model_ranks)
    for event in events:
        builder.add(event)
    links, beside = machine.fabric.resources(), {}
    if machine.device is not None:
        beside = {HOST_LINK: Link(machine.device.host_rate), STORAGE: Link(machine.device.storage_rate)}
    found = simulate(builder.tasks, {**links, **beside})
    if any(link.burst for link in links.values()):  # the previous step has left less than a full burst
        for link in links.values():
            link.begin_again(found.makespan)
        found = simulate(builder.tasks, {**links, **beside})
    return found


def waits_for(schedule: Schedule) -> str:
    """Return the resource, other than the training thread, with the largest share of the critical path; "" if none."""
    shares: dict[str, float] = {}
    for number in schedule.critical_path():
        resource = schedule.tasks[number].resource
        if resource != COMPUTE:
            shares[resource] = shares.get(resource, 0.0) + schedule.ends[number] - schedule.starts[number]
    return max(shares, key=lambda name: shares[name], default="")


class Builder:
    """Turns events into tasks: those of the training thread run in order, collectives and copies overlap with them."""

    def __init__(
        self, setting: PlanSetting, work: StepWork, machine: StepMachine, model_ranks: int = 1
    ) -> None:
        self.setting, self.work, self.machine = setting, work, machine
        self.fabric = machine.fabric
        self.model_ranks = model_ranks
        self.tasks: list[Task] = []
        self.last: tuple[int, ...] = ()
        """Tasks that must end before the training thread's next task."""
        self.open: dict[int, tuple[list[Transmission], int | None]] = {}
        self.leaving: list[int] = []  # gradients on their way to host memory
        self._wire_share = _wire_share_of_gathers(setting.plan)

    def add(self, event: Event) -> None:
        if isinstance(event, ComputeCall):
            self._compute(event)
        elif isinstance(event, CollectiveStart):
            self._start(event)
        elif isinstance(event, CollectiveWait):
            self._wait(event.number)
        else:
            self._update(event)

    def _put(self, name: str, resource: str, work: float, after: tuple[int, ...], wait: float = 0.0) -> int:
        self.tasks.append(Task(name, resource, work, after, wait))
        return len(self.tasks) - 1

    def _on_thread(self, name: str, seconds: float) -> None:
        self.last = (self._put(name, COMPUTE, seconds * self.work.contention, self.last),)

    def _compute(self, event: ComputeCall) -> None:
        forward = event.phase is MemoryPhase.FORWARD
        seconds = (self.work.forward if forward else self.work.backward)[event.call]
        self._on_thread(f"{'forward' if forward else 'backward'} {event.call}", seconds)
        for exchange in self.work.extra[event.call] if self.work.extra else ():
            self._exchange(exchange)

    def _exchange(self, exchange: PlannedExchange) -> None:
        group = RankGroup(exchange.ranks, min(exchange.ranks, self.fabric.ranks_per_node))
        for _ in range(exchange.times):
            self._pass_all(exchange.operation, self.fabric.parts(exchange.operation, exchange.nbytes, group))

    def _pass_all(self, name: str, parts: Sequence[Transmission]) -> None:
        """Add a blocking collective."""
        for part in parts:
            self.last = (self._put(name, part.resource, part.nbytes, self.last, self._latency(part)),)
            if part.work:
                self._on_thread(f"sum of {name}", part.work)

    def _latency(self, part: Transmission) -> float:
        return part.latency * self.work.contention

    # Collectives of the engine ------------------------------------------------------------------------------

    def _start(self, event: CollectiveStart) -> None:
        packed = event.operation in GATHERS and event.nbytes > SMALL_MESSAGE
        nbytes, group = event.nbytes * (self._wire_share if packed else 1.0), self._group(event)
        parts = self.fabric.parts(event.operation, nbytes, group)
        after = self.last
        offload = self.setting.plan.param_offload
        gathers = event.operation in GATHERS and event.nbytes > SMALL_MESSAGE
        if self.machine.device is not None and offload is not None and gathers:
            shard_bytes = event.nbytes / event.ranks
            if offload.folder is not None:
                after = (self._put("read shard", STORAGE, shard_bytes, after),)
            after = (self._put("copy shard", HOST_LINK, shard_bytes, after),)
        now, later = (parts, []) if self.fabric.background else (parts[:1], list(parts[1:]))
        for part in now:
            after = (self._put(event.operation, part.resource, part.nbytes, after, self._latency(part)),)
        begun = after[0] if after != self.last else None
        work = sum(part.work for part in now)
        self.open[event.number] = ([Transmission("", 0.0, 0.0, work), *later] if work or later else [], begun)

    def _group(self, event: CollectiveStart) -> RankGroup:
        """Return the group of a collective, with its ranks per node: data-parallel ranks are ``model_ranks`` apart."""
        there = max(1, self.fabric.ranks_per_node // (self.model_ranks * event.stride))
        return RankGroup(event.ranks, min(event.ranks, there))

    def _wait(self, number: int) -> None:
        rest, begun = self.open.pop(number, ([], None))
        if begun is not None:
            self.last = tuple(dict.fromkeys((*self.last, begun)))
        for part in rest:
            if part.resource:
                self.last = (
                    self._put("second half", part.resource, part.nbytes, self.last, self._latency(part)),
                )
            if part.work:
                self._on_thread("sum", part.work)

    # The update ---------------------------------------------------------------------------------------------

    def _update(self, event: OptimizerUpdate) -> None:
        offload, device = self.setting.plan.state_offload, self.machine.device
        if offload is None or device is None:
            self._on_thread("update", event.elements * self.work.per_element)
            return
        there = event.elements * offload.ratio
        self._on_thread("update", (event.elements - there) * self.work.per_element)
        pieces = max(1, min(64, round(there / max(1, offload.sub_group_numel)) or 1))
        # Gradients were copied out during backward; weights return piece by piece, overlapping the next update.
        begin, ends = self.last, []
        for _ in range(pieces):
            after, numel = begin, there / pieces
            if offload.folder is not None:
                after = (self._put("read states", STORAGE, numel * STATE_BYTES, after),)
            done = self._put("update on host", HOST, numel * device.host_update, after)
            if offload.folder is not None:
                ends.append(self._put("write states", STORAGE, numel * STATE_BYTES, (done,)))
            ends.append(self._put("copy weights", HOST_LINK, numel * 2.0, (done,)))
        self.last = (*self.last, *ends)


def _wire_share_of_gathers(plan: Plan) -> float:
    """Return the share of a gather's bytes that travels: less than 1 for quantized payloads (qwZ). Sums are already
    recorded with their wire size."""
    bits, dtype = plan.packing.weights, plan.precision.param
    itemsize = dtype.itemsize if dtype is not None else 4
    return bytes_per_element(codec_named(f"int{bits}")) / itemsize if bits else 1.0
