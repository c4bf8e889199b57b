"""Trainers that build on the pipeline engine, with their own instructions, schedules and partitions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.comm.topology import ProcessTopology
from deepspeed.engine.pipeline.engine import (
    BATCH_INPUT_TIMER,
    PIPE_RECV_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
    TRAIN_BATCH_TIMER,
    PipelineEngine,
)
from deepspeed.parallel.pipeline import PipelineModule
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages import p2p
from deepspeed.parallel.pipeline.schedules import instructions as schedule
from deepspeed.parallel.pipeline.schedules.instructions import (
    BackwardPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TrainSchedule,
    _is_even,
    _is_odd,
)
from tests.parallel.pipeline.test_engine import COUNT, MICRO, Plain, batches, layers, loss_of, set_weights
from tests.pool import distributed

STEPS = 3


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` as a trainer patches it, or an entry of a dict."""
    mapping = isinstance(owner, dict)
    before = owner.get(name) if mapping else vars(owner)[name]
    try:
        owner.__setitem__(name, value) if mapping else setattr(owner, name, value)
        yield
    finally:
        if mapping and before is None:
            del owner[name]
        elif mapping:
            owner[name] = before
        else:
            setattr(owner, name, before)


def build(
    kind: type[PipelineEngine] = PipelineEngine, *, stages: int = 2, stage: int = 0, **more: Any
) -> Any:
    """Make an engine of class ``kind``, as a trainer makes one of its own class."""
    module = more.pop("module", None) or PipelineModule(layers(tied=True), num_stages=stages, loss_fn=loss_of)
    set_weights(module)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": COUNT,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
        **more,
    }
    config = {key: value for key, value in config.items() if value is not None}
    return kind(args=None, model=module, mpu=module.mpu(), config=config)


def trained(engine: Any) -> list[float]:
    data = batches(engine.grid.get_data_parallel_rank())
    return [engine.train_batch(data).item() for _ in range(STEPS)]


class OwnForward(PipelineEngine):
    """Overrides one instruction, as trainers do whose layers return several losses."""

    forwards = 0

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self.mem_status("before the forward", reset_max=True)
        inputs = self.pipe_buffers["inputs"][buffer_id]
        outputs = super(PipelineEngine, self).forward(inputs.clone())
        self.pipe_buffers["outputs"][buffer_id] = outputs
        if self.is_last_stage():
            self.loss = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
            self.fwd_outputs.append([self.loss.detach(), outputs.detach().mean()])
        self.forwards += 1


class AllForwardsFirst(PipeSchedule):
    """GPipe: all forwards, then all backwards; so every micro-batch has a buffer."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for number in range(self.micro_batches):
            found: list[PipeInstruction] = []
            if self.is_first_stage or self.is_last_stage:
                found.append(LoadMicroBatch(number))
            if not self.is_first_stage:
                found.append(RecvActivation(number))
            found.append(ForwardPass(number))
            if not self.is_last_stage:
                found.append(SendActivation(number))
            yield found
        for number in range(self.micro_batches):
            found = [] if self.is_last_stage else [RecvGrad(number)]
            found.append(BackwardPass(number))
            if not self.is_first_stage:
                found.append(SendGrad(number))
            yield found
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class OwnTrainer(OwnForward):
    """Has its own ``train_batch`` and ``eval_batch``, which return several losses per micro-batch."""

    def train_batch(self, data_iter: Any = None) -> Any:
        self.reset_activation_shape()
        self.set_dataiterator(data_iter)
        self.module.train()
        self._compute_loss = True
        self.timers(TRAIN_BATCH_TIMER).start()
        self._exec_schedule(AllForwardsFirst(self.micro_batches, self.num_stages, self.stage_id))
        self.timers(TRAIN_BATCH_TIMER).stop()
        assert self.timers(TRAIN_BATCH_TIMER).elapsed(reset=True) > 0
        mean = torch.zeros(())
        if self.is_last_stage():
            mean = torch.stack([losses[0] for losses in self.fwd_outputs]).mean()
            assert len(self.fwd_outputs) == COUNT
        dist.broadcast(
            mean, self.grid.stage_to_global(self.num_stages - 1), self.grid.get_pipe_parallel_group()
        )
        dist.all_reduce(mean, group=self.grid.get_data_parallel_group())
        self.agg_train_loss = mean / self.grid.get_data_parallel_world_size()
        return self.agg_train_loss


@pytest.mark.parametrize("stage", [0, 1])
@distributed(world_size=4)
def test_own_instructions_and_schedules_train_as_1f1b(stage: int) -> None:
    expected = build(stage=stage)
    losses = trained(expected)
    weights = {name: param.detach().clone() for name, param in expected.module.named_parameters()}
    expected.destroy()
    for kind in (OwnForward, OwnTrainer):
        engine = build(kind, stage=stage)
        assert trained(engine) == pytest.approx(losses, abs=1e-6)
        assert engine.forwards == STEPS * COUNT
        assert engine.global_steps == STEPS and engine.micro_steps == STEPS * COUNT
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param, weights[name], rtol=0, atol=1e-6)
        engine.destroy()


@distributed(world_size=2)
def test_our_own_schedules_by_instructions_give_the_same_bits() -> None:
    """Training and evaluation, of what ``runtime.pipe.schedule`` shows."""
    expected = build()
    losses = trained(expected)
    result, logits = expected.eval_batch(batches(5), return_logits=True, num_micro_batches=3)
    expected.destroy()

    class Same(PipelineEngine):
        def _exec_send_grads(self, buffer_id: int) -> None:
            super()._exec_send_grads(buffer_id)

    engine = build(Same, wall_clock_breakdown=True)
    assert trained(engine) == losses
    assert engine.agg_train_loss == losses[-1]
    evaluated, outputs = engine.eval_batch(batches(5), return_logits=True, num_micro_batches=3)
    assert torch.equal(evaluated, result)
    if engine.is_last_stage():
        assert torch.equal(outputs, logits)
    timed = engine.timers.get_timers()
    assert BATCH_INPUT_TIMER in timed
    assert (PIPE_SEND_OUTPUT_TIMER in timed) == (PIPE_RECV_GRAD_TIMER in timed) == engine.is_first_stage()
    engine.destroy()


@distributed(world_size=2)
def test_an_optimizer_that_comes_after_the_engine() -> None:
    """As trainers do whose optimizer needs the engine."""
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True, "adam_w_mode": False}}}
    expected = build(**adam)
    losses = trained(expected)
    expected.destroy()
    engine = build(optimizer=None)
    parameters = [param for param in engine.module.parameters() if param.requires_grad]
    engine._configure_optimizer(lambda params: torch.optim.Adam(params, lr=0.02), parameters)
    assert trained(engine) == pytest.approx(losses, abs=1e-6)
    engine.destroy()


def _steps_that_load_first(self: TrainSchedule) -> Iterator[list[PipeInstruction]]:
    """1F1B, in which data are read before activations arrive."""
    before = -1
    for step in range(2 * (self.micro_batches + self.stages - 1)):
        now, is_forward = self._step_to_micro_batch(step)
        found: list[PipeInstruction] = []
        sends, works = self._valid_micro_batch(before), self._valid_micro_batch(now)
        neighbour = self.prev_stage if is_forward else self.next_stage
        if works and is_forward and (self.is_first_stage or self.is_last_stage):
            found.append(LoadMicroBatch(self._buffer_idx(now)))
        if self._valid_stage(neighbour):
            if sends:
                found.append((SendGrad if is_forward else SendActivation)(self._buffer_idx(before)))
            if works:
                found.append((RecvActivation if is_forward else RecvGrad)(self._buffer_idx(now)))
        if works:
            found.append((ForwardPass if is_forward else BackwardPass)(self._buffer_idx(now)))
        yield found
        before = now
    yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


@distributed(world_size=4)
def test_patched_steps_and_instructions_are_followed() -> None:
    """As diffusion trainers do: patch ``TrainSchedule.steps``, and the map with a function."""
    expected = build(stages=4)
    losses = trained(expected)
    expected.destroy()
    called = []

    def reduce(self: PipelineEngine) -> None:
        called.append(self.stage_id)

    with (
        replaced(schedule.TrainSchedule, "steps", _steps_that_load_first),
        replaced(PipelineEngine._INSTRUCTION_MAP, ReduceGrads, reduce),
    ):
        engine = build(stages=4)
        assert trained(engine) == losses
        assert called == [engine.stage_id] * STEPS
        engine.destroy()


class Nothing(torch.optim.Optimizer):
    """An optimizer whose parameters were updated when their gradients came."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@distributed(world_size=1)
def test_updates_as_soon_as_a_gradient_is_there() -> None:
    """Gradient release: hooks update and drop each gradient, and ``ReduceGrads`` does nothing."""

    def release(param: Tensor) -> None:
        assert param.grad is not None
        param.data.add_(param.grad, alpha=-0.1)
        param.grad = None

    def make(params: list[nn.Parameter]) -> Nothing:
        for param in params:
            param.register_post_accumulate_grad_hook(release)
        return Nothing(params)

    specs, plain = layers(), Plain(layers(), lr=0.0)
    data, losses = batches(0), []
    for _ in range(STEPS * COUNT):
        inputs, labels = next(data)
        loss = loss_of(plain.forward(inputs), labels)
        gradients = torch.autograd.grad(loss / COUNT, list(plain.params.values()))
        for param, gradient in zip(plain.params.values(), gradients, strict=True):
            param.data.add_(gradient, alpha=-0.1)
        losses.append(loss.item())
    module = PipelineModule(specs, num_stages=1, loss_fn=loss_of)
    set_weights(module)
    with replaced(PipelineEngine._INSTRUCTION_MAP, ReduceGrads, lambda self: None):
        engine = deepspeed.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            optimizer=make,
            config={"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": COUNT},
        )[0]
        found = trained(engine)
    means = [sum(losses[step * COUNT : (step + 1) * COUNT]) / COUNT for step in range(STEPS)]
    assert found == pytest.approx(means, abs=1e-5)
    for name, param in module.named_parameters():
        torch.testing.assert_close(param, plain.params[name], rtol=0, atol=1e-6)
    engine.destroy()


class InputsOnly(BufferOpInstruction):
    pass


class WeightsOnly(BufferOpInstruction):
    pass


class SplitBackwards(AllForwardsFirst):
    """Gradients of inputs first; those of weights after the others were sent."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in super().steps():
            split = [InputsOnly(each.buffer_id) if type(each) is BackwardPass else each for each in step]
            yield split + [WeightsOnly(each.buffer_id) for each in step if type(each) is BackwardPass]


def _differentiated(engine: PipelineEngine, buffer_id: int) -> tuple[Any, Any]:
    if engine.is_last_stage():
        return engine.loss / COUNT, None
    return engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer


def _exec_inputs_only(self: Any, buffer_id: int) -> None:
    outputs, gradients = _differentiated(self, buffer_id)
    inputs = self.pipe_buffers["inputs"][buffer_id]
    if inputs.requires_grad:
        torch.autograd.backward(outputs, gradients, inputs=[inputs], retain_graph=True)


def _exec_weights_only(self: Any, buffer_id: int) -> None:
    outputs, gradients = _differentiated(self, buffer_id)
    weights = [param for param in self.module.parameters() if param.requires_grad]
    if self.is_last_stage():
        super(PipelineEngine, self).backward(self.loss)
        return
    torch.autograd.backward(outputs, gradients, inputs=weights)


@distributed(world_size=2)
def test_a_schedule_and_instructions_that_split_backwards() -> None:
    """As with zero-bubble options: another ``TrainSchedule``, new instructions that call autograd themselves."""
    expected = build()
    losses = trained(expected)
    expected.destroy()
    known = PipelineEngine._INSTRUCTION_MAP
    with (
        replaced(schedule, "TrainSchedule", SplitBackwards),
        replaced(known, InputsOnly, _exec_inputs_only),
        replaced(known, WeightsOnly, _exec_weights_only),
    ):
        engine = build()
        assert not engine.using_bf16_optimizer and not engine.is_pipe_partitioned
        assert trained(engine) == pytest.approx(losses, abs=1e-6)
        assert engine.micro_steps == STEPS * COUNT
        engine.destroy()


class LoadTwice(PipeInstruction):
    def __init__(self, *buffer_ids: int, **kwargs: Any) -> None:
        super().__init__(buffer_ids=buffer_ids, **kwargs)


class ReferencePass(BufferOpInstruction):
    pass


class WithReference(AllForwardsFirst):
    """Preference training: each micro-batch has a forward without gradients in addition to the training one."""

    def num_pipe_buffers(self) -> int:
        return self.micro_batches + 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        extra = self.micro_batches
        for step in super().steps():
            found: list[PipeInstruction] = []
            for each in step:
                if isinstance(each, LoadMicroBatch):
                    found.append(LoadTwice(extra, each.buffer_id))
                elif isinstance(each, ForwardPass):
                    found += [ReferencePass(extra), each]
                elif isinstance(each, (SendActivation, RecvActivation)):
                    found += [type(each)(extra), each]
                else:
                    found.append(each)
            yield found


class Preferring(PipelineEngine):
    references = 0

    def _exec_load_twice(self, buffer_ids: tuple[int, ...]) -> None:
        inputs, labels = self._next_batch()
        for buffer_id in buffer_ids:
            if self.is_first_stage():
                self.pipe_buffers["inputs"][buffer_id] = inputs
            if self.is_last_stage():
                self.pipe_buffers["labels"][buffer_id] = labels

    @torch.no_grad()
    def _exec_reference_pass(self, buffer_id: int) -> None:
        inputs = self.pipe_buffers["inputs"][buffer_id]
        assert not inputs.requires_grad
        self.pipe_buffers["outputs"][buffer_id] = super(PipelineEngine, self).forward(inputs)
        self.references += 1

    def train_batch(self, data_iter: Any = None) -> Any:
        self.set_dataiterator(data_iter)
        self._exec_schedule(WithReference(self.micro_batches, self.num_stages, self.stage_id))
        return self.agg_train_loss

    def generate(self) -> None:
        """Instructions without a schedule, and messages of the caller's own."""
        self._reserve_pipe_buffers(2)
        with torch.no_grad():
            if self.is_first_stage():
                self.pipe_buffers["inputs"][1] = torch.tensor([[3, 4]])
            self._exec_recv_activations(1)
            self._exec_forward_pass(1)
            self._exec_send_activations(1)
            if self.is_last_stage():
                p2p.send(self.pipe_buffers["outputs"][1].argmax(-1), 0)
            if self.is_first_stage():
                p2p.recv(torch.empty(1, 2, dtype=torch.int64), self.num_stages - 1)

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        LoadTwice: _exec_load_twice,
        ReferencePass: _exec_reference_pass,
    }


@distributed(world_size=2)
def test_a_second_forward_per_micro_batch_and_instructions_without_a_schedule() -> None:
    expected = build()
    losses = trained(expected)
    expected.destroy()
    engine = build(Preferring)
    assert trained(engine) == pytest.approx(losses, abs=1e-6)
    assert engine.references == STEPS * COUNT
    engine._compute_loss = False
    engine.generate()
    engine.destroy()


class ByHand(PipelineModule):
    """Divides the layers by numbers that the caller gives, and counts frozen weights too."""

    def __init__(self, *args: Any, split: list[int] | None = None, **kwargs: Any) -> None:
        self.split = split
        super().__init__(*args, **kwargs)

    def _partition_layers(self, method: str = "uniform") -> None:
        if self.split is None:
            return super()._partition_layers(method)
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = [0, *self.split, len(self._layer_specs)]
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _count_layer_params(self) -> list[int]:
        return [
            1 if "Block" in str(self._layer_specs[number]) else 5 for number in range(len(self._layer_specs))
        ]


@distributed(world_size=2)
def test_own_partitions() -> None:
    specs = layers()
    module = ByHand(specs, num_stages=2, loss_fn=loss_of, split=[1])
    assert module.partitions() == [0, 1, 6]
    engine = build(module=module)
    expected = build(module=PipelineModule(specs, num_stages=2, loss_fn=loss_of, partition_method="uniform"))
    assert trained(engine) == pytest.approx(trained(expected), abs=1e-6)
    engine.destroy()
    expected.destroy()
    counted = ByHand([*specs, *specs[1:3]], num_stages=2, loss_fn=loss_of)  # 5 1 1 1 1 5 1 1
    assert counted.partitions() == [0, 4, 8]
    assert counted._find_layer_type("block") == [1, 2, 3, 4, 6, 7]
    with pytest.raises(PipelineError, match=r"parts=\[0, 7, 6\].*3 ascending numbers from 0 to 6"):
        ByHand(specs, num_stages=2, loss_fn=loss_of, split=[7])
    with pytest.raises(PipelineError, match=r"_set_bounds\(0, 6\)"):
        counted._set_bounds(0, 6)


@distributed(world_size=4)
def test_replicas_before_stages() -> None:
    """A topology whose outer axis is "data" divides work as one whose outer axis is "pipe"."""

    class Columns(ProcessTopology):
        def __init__(self, num_pp: int, num_dp: int) -> None:
            super().__init__(axes=["data", "pipe"], dims=[num_dp, num_pp])

    module = PipelineModule(layers(tied=True), topology=Columns(2, 2), loss_fn=loss_of)
    engine, expected = build(OwnForward, module=module), build()
    assert trained(engine) == pytest.approx(trained(expected), abs=1e-6)
    engine.destroy()
    expected.destroy()


@distributed(world_size=2)
def test_what_instructions_refuse() -> None:
    class Unknown(PipeSchedule):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            yield [InputsOnly(0)]

    engine = build(OwnForward)
    with pytest.raises(
        PipelineError, match=r"does not understand InputsOnly\(buffer_id=0\).*_INSTRUCTION_MAP"
    ):
        engine._exec_schedule(Unknown(1, 2, engine.stage_id))
    assert len(trained(engine)) == STEPS  # nothing is left of the failed one
    engine.destroy()
    chunked = PipelineModule(layers(blocks=6), num_stages=2, chunks=2, loss_fn=loss_of)
    engine = build(OwnForward, module=chunked)
    with pytest.raises(PipelineError, match="one chunk per stage"):
        engine.train_batch(batches(0))
    engine.destroy()


def test_the_helpers_of_schedules() -> None:
    assert _is_even(2) and not _is_even(3) and _is_odd(3) and not _is_odd(-2)
    steps = TrainSchedule(micro_batches=3, stages=2, stage_id=1)
    assert [steps._step_to_micro_batch(step) for step in range(4)] == [
        (-1, False),
        (0, True),
        (0, False),
        (1, True),
    ]
    assert deepspeed.engine.pipeline.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine
    assert issubclass(PipelineEngine, nn.Module)
