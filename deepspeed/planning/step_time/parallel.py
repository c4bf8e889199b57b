"""Step time of a job with several parallel axes: data, tensor, pipeline stages, sequence, experts.

Along the data axis, the engine's own program is simulated. The layers' collectives along the other axes are added to
each layer: two activation sums per layer and pass between tensor-parallel ranks (M. Shoeybi et al.: Megatron-LM, 2019),
all-to-alls of queries, keys, values and results between sequence-parallel ranks (S. A. Jacobs et al.:
DeepSpeed-Ulysses, 2023), dispatch and combine of expert parallelism (S. Rajbhandari et al.: DeepSpeed-MoE, 2022).
Pipeline stages follow their order (``parallel/pipeline/schedules/orders.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed.parallel.pipeline.schedules.orders import Durations, one_forward_one_backward
from deepspeed.parallel.pipeline.schedules.orders import simulate as simulate_stages
from deepspeed.planning.activations import TransformerShape
from deepspeed.planning.event_log import ComputeCall
from deepspeed.planning.ledger import MemoryPhase
from deepspeed.planning.planner import PlanSetting
from deepspeed.planning.request import PlanAnswer
from deepspeed.planning.step_time.calibration import Calibration, fabric_of, work_of
from deepspeed.planning.step_time.fabric import Fabric
from deepspeed.planning.step_time.hardware import Device, NetworkSpec, network
from deepspeed.planning.step_time.shapes import shape_flops
from deepspeed.planning.step_time.step import (
    Event,
    StepMachine,
    StepProgram,
    StepTime,
    program_of,
    run,
    schedule_of,
)
from deepspeed.planning.step_time.work import (
    BACKWARD,
    PlannedExchange,
    StepWork,
    flops_by_call,
    layer_calls,
    work_of_device,
)

SIMULATED = 3
"""Micro-batches after which each further one takes as long as the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """A parallel layout: the degree of each axis. ``offload``: 0 nothing, 1 optimizer states to the host, 2 parameters,
    too."""

    stage: int = 0
    tensor: int = 1
    stages: int = 1
    sequence: int = 1
    experts: int = 1
    offload: int = 0
    checkpointing: bool = False

    @property
    def model_ranks(self) -> int:
        """Number of ranks that work on the same samples."""
        return self.tensor * self.stages * self.sequence

    def __str__(self) -> str:
        axes = {"TP": self.tensor, "PP": self.stages, "SP": self.sequence, "EP": self.experts}
        parts = [f"ZeRO {self.stage}", *(f"{name} {size}" for name, size in axes.items() if size > 1)]
        parts += [("", "offload", "offload all")[self.offload]] if self.offload else []
        return ", ".join([*parts, *(["recompute"] if self.checkpointing else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelJob:
    """Hardware and shape of a job: named devices, or machines like the calibrated one."""

    network: NetworkSpec
    ranks_per_node: int
    device: Device | None = None
    calibration: Calibration | None = None
    tokens: int = 1
    """Tokens per micro-batch, before sequence parallelism divides them."""
    sequence: int = 0
    shape: TransformerShape | None = None
    item: int = 2

    @property
    def machine(self) -> StepMachine:
        if self.device is not None:
            inside = network(self.device.inside)
            fabric = Fabric(ranks_per_node=self.ranks_per_node, between=self.network, inside=inside)
            return StepMachine(fabric=fabric, device=self.device)
        assert self.calibration is not None
        return StepMachine(fabric=fabric_of(self.calibration, self.network, self.ranks_per_node))

    def estimated_seconds(self, layout: ParallelLayout, numel: float, data: int, micro_batches: int) -> float:
        """Estimate the step time in seconds by closed formulas, without overlap. ``numel``: parameters of a rank's
        part; ``data``: ranks that share its states."""
        tensor, stages, stage = layout.tensor, layout.stages, layout.stage
        tokens = self.tokens / layout.sequence
        rate = self._rate()
        flops = (
            shape_flops(self.shape, 1) * tokens / (tensor * stages)
            if self.shape is not None
            else 2.0 * numel * tokens
        )
        compute = flops * (1 + BACKWARD + layout.checkpointing) / rate * (micro_batches + stages - 1)
        near = self.ranks_per_node
        node = self.network.payload_rate * (near if self.network.per_device else 1)
        inside = self.machine.fabric.inside
        fast = inside.payload_rate * (near if inside.per_device else 1)
        bandwidth = (node if data * tensor * stages > near else fast) / min(near, tensor * stages)
        gathers = 2.0 * micro_batches if stage == 3 else float(stage > 0)
        sums = (micro_batches if stage >= 2 else 1) * (1.0 if stage else 2.0)
        moved = self.item * numel * (gathers + sums) * (data > 1)
        layers = self.shape.layers / stages if self.shape is not None else 0
        hidden = self.shape.hidden if self.shape is not None else 0
        between = 8.0 * layers * tokens * hidden * self.item * (tensor > 1) * near / fast
        return compute + moved / bandwidth + between * micro_batches

    def _rate(self) -> float:
        if self.device is not None:
            return self.device.flops * self.device.share
        assert self.calibration is not None
        alone = self.calibration.of(1, 0) or next(iter(self.calibration.steps.values()))
        return max(1.0, self.calibration.flops / max(alone.forward, 1e-12))


def seconds_of(
    found: Sequence[PlanAnswer], job: ParallelJob, layout: ParallelLayout = ParallelLayout()
) -> StepTime:
    """Predict the step time, from the plans of a rank on the first and on the last stage (a single one if there is one
    stage)."""
    works = [_work(each, job, layout) for each in found]
    settings = [each.setting for each in found]
    if layout.stages == 1:
        return _accumulated(settings[0], works[0], job.machine, layout.tensor)
    return _pipeline(settings, works, job, layout.tensor, layout.stages)


def _work(found: PlanAnswer, job: ParallelJob, layout: ParallelLayout) -> StepWork:
    setting, request = found.setting, found.request
    tokens = job.tokens // layout.sequence
    shape = None
    if job.shape is not None:
        shape = replace(
            job.shape,
            heads=max(1, job.shape.heads // layout.tensor),
            layers=max(1, job.shape.layers // request.split.stages),
        )
    flops = flops_by_call(request.module, setting.model, tokens, job.sequence, shape)
    if job.device is not None:
        work = work_of_device(job.device, flops, recompute=request.checkpointing)
    else:
        assert job.calibration is not None
        work = work_of(job.calibration, setting, flops, job.ranks_per_node)
        if request.checkpointing:
            both = zip(work.backward, work.forward, strict=True)
            work = replace(work, backward=[backward + forward for backward, forward in both])
    return replace(work, extra=_exchanges(setting, job, tokens, layout))


def _exchanges(
    setting: PlanSetting, job: ParallelJob, tokens: int, layout: ParallelLayout
) -> list[list[PlannedExchange]]:
    """Return, by call, a block's collectives in one direction."""
    per_block: list[PlannedExchange] = []
    shape = job.shape
    if shape is not None:
        states = float(tokens * shape.hidden * job.item)
        heads = float(tokens * (shape.heads + shape.kv_heads) * shape.head_dim * job.item)
        for operation, nbytes, ranks in (
            ("all_reduce", states, layout.tensor),
            ("all_to_all", heads, layout.sequence),
            ("all_to_all", states, layout.experts),
        ):
            if ranks > 1:
                per_block.append(PlannedExchange(operation, nbytes, ranks, 2))
    # A block may be several calls (experts have their own): only those that `layer_calls` returns get collectives.
    blocks = layer_calls(setting.model)
    return [per_block if call in blocks else [] for call in range(len(setting.model.calls))]


# Micro-batches -----------------------------------------------------------------------------------------------


def _accumulated(setting: PlanSetting, work: StepWork, machine: StepMachine, model_ranks: int) -> StepTime:
    """Simulate ``SIMULATED + 1`` micro-batches and extrapolate: each further one takes as long as the
    last."""
    count = setting.micro_batches
    if count <= SIMULATED + 1:
        return run(program_of(setting), setting, work, machine, model_ranks)
    program = program_of(setting, SIMULATED + 1)
    many = run(program, setting, work, machine, model_ranks)
    fewer = run(StepProgram(program.micro_batches[1:], program.update), setting, work, machine, model_ranks)
    more = count - (SIMULATED + 1)
    return StepTime(
        many.seconds + more * (many.seconds - fewer.seconds),
        many.compute + more * (many.compute - fewer.compute),
        many.waits_for,
    )


def _pipeline(
    settings: Sequence[PlanSetting], works: Sequence[StepWork], job: ParallelJob, tensor: int, stages: int
) -> StepTime:
    """Simulate the 1F1B order with the simulated times of a micro-batch, then add gradient sums and update of the
    slowest stage.

    Middle stages are assumed to be as fast as the faster of the first and the last, which also hold embedding or head.
    """
    machine = job.machine
    ends = [
        _directions(setting, work, machine, tensor) for setting, work in zip(settings, works, strict=True)
    ]
    hidden = job.shape.hidden if job.shape is not None else 0
    sent = float(job.tokens * hidden * job.item)
    send = machine.fabric.point_to_point(sent, tensor * stages)
    between = min(ends, key=sum)
    durations = [
        Durations(forward=each[0], backward=each[1], weights=0.0, send=send)
        for each in (ends[0], *[between] * (stages - 2), ends[-1])
    ]
    count = settings[0].micro_batches
    batch = simulate_stages(one_forward_one_backward(stages, count), durations)
    rests = [_rest(setting, work, machine, tensor) for setting, work in zip(settings, works, strict=True)]
    rest = max(rests, key=lambda each: each.seconds)
    compute = max(sum(each) for each in ends) * count + rest.compute
    seconds = batch.makespan + rest.seconds
    waiting = "other stages" if batch.bubble * batch.makespan > rest.exposed else rest.waits_for
    return StepTime(seconds, min(compute, seconds), waiting)


def _directions(
    setting: PlanSetting, work: StepWork, machine: StepMachine, model_ranks: int
) -> tuple[float, float]:
    """Return the seconds of a micro-batch's forward and backward, without data-parallel communication."""
    calls = range(len(setting.model.calls))
    events: list[Event] = [ComputeCall(MemoryPhase.FORWARD, call) for call in calls]
    forward = schedule_of(events, setting, work, machine, model_ranks).makespan
    events = [ComputeCall(MemoryPhase.BACKWARD, call) for call in reversed(calls)]
    return forward, schedule_of(events, setting, work, machine, model_ranks).makespan


def _rest(setting: PlanSetting, work: StepWork, machine: StepMachine, model_ranks: int) -> StepTime:
    """Simulate the gradient sums, once per batch, and the update."""
    program = program_of(setting, 1)
    sums = [event for event in program.micro_batches[0] if not isinstance(event, ComputeCall)]
    return run(StepProgram([sums], program.update), setting, work, machine, model_ranks)
