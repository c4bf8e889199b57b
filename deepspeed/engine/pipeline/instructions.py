"""Batches run instruction by instruction, for trainers with their own schedules or instructions.

``PipelineEngine._exec_schedule`` takes this stage's schedule (``schedules/instructions.py``) and calls, for each
instruction, the function in ``PipelineEngine._INSTRUCTION_MAP`` for its class. State between instructions is in the
documented attributes ``pipe_buffers``, ``loss``, ``grad_layer``, ``fwd_outputs``. Messages use the same channels as
other batches, so shapes may change, and results equal those of the engine's own orders.

``train_batch`` and ``eval_batch`` use this if something was replaced (``_replaced``), otherwise ``order_executor.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.base.logging import log_dist
from deepspeed.base.memory import see_memory_usage
from deepspeed.engine.pipeline.base import PipelineEngineBase
from deepspeed.engine.pipeline.stage import BatchLosses, Stage
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.values import without_graph, writable
from deepspeed.parallel.pipeline.schedules import instructions as schedule
from deepspeed.parallel.pipeline.schedules.instructions import PipeInstruction, PipeSchedule
from deepspeed.parallel.pipeline.schedules.orders import Action, ActionKind
from deepspeed.parallel.pipeline.split_backward import WeightQueue
from deepspeed.zero.gradients.backward import tensors_in

BATCH_INPUT_TIMER = "batch_input"
TRAIN_BATCH_TIMER = "train_batch"
PIPE_SEND_OUTPUT_TIMER = "pipe_send_output"
PIPE_SEND_GRAD_TIMER = "pipe_send_grad"
PIPE_RECV_INPUT_TIMER = "pipe_recv_input"
PIPE_RECV_GRAD_TIMER = "pipe_recv_grad"

BUFFERS = ("inputs", "labels", "outputs", "output_tensors")
TIMERS: dict[type[PipeInstruction], str] = {
    schedule.LoadMicroBatch: BATCH_INPUT_TIMER,
    schedule.SendActivation: PIPE_SEND_OUTPUT_TIMER,
    schedule.SendGrad: PIPE_SEND_GRAD_TIMER,
    schedule.RecvActivation: PIPE_RECV_INPUT_TIMER,
    schedule.RecvGrad: PIPE_RECV_GRAD_TIMER,
}
"""Instructions that are timed with ``wall_clock_breakdown``."""


class InstructionExecutor(PipelineEngineBase):
    """The base of ``PipelineEngine`` that executes a schedule's instructions: a base and not a part, because trainers
    override its methods and call them with ``super()``."""

    _INSTRUCTION_MAP: ClassVar[dict[type[PipeInstruction], Callable[..., Any]]]
    """Instruction class -> function of the engine and the instruction's arguments. A trainer may insert functions,
    also for new instructions; a subclass may also override a method of ours by name."""
    loss: Tensor | Any = None
    """Loss of the current micro-batch, on the last stage."""
    grad_layer: Any = None
    """Gradients of the current outputs: a tensor, or a tuple for the outputs that require gradients."""
    eval_return_logits = False
    """True if ``outputs`` holds the last stage's outputs after an evaluation."""
    is_pipe_partitioned = False
    is_grad_partitioned = False
    """Messages are never partitioned: tensor-parallel ranks send whole tensors."""
    pipe_partition_input_meta_cache = None
    pipe_partition_output_meta_cache = None
    using_bf16_optimizer = False
    """The engine itself accumulates gradients in the configured dtype."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fwd_outputs: list[Any] = []
        """Detached results of each forward of the last schedule, on the last stage."""
        self._pipe_buffers: dict[str, list[Any]] = {}
        self._buffer_states: dict[int, tuple[Any, Any]] = {}
        """Buffer -> ``loss`` and ``grad_layer`` after its last instruction."""
        self._batch_losses = BatchLosses(self)
        self._stage = Stage(self, self._batch_losses, WeightQueue(_no_gradient))
        self._results: list[Any] = []
        """Losses, or outputs, of the micro-batches of the current schedule."""
        self._mean: Tensor | None = None
        """Mean loss of the batch, once all ranks have it."""
        self._instruction: PipeInstruction | None = None
        self._said_replaced = False

    # A schedule -----------------------------------------------------------------------------------------------

    def _replaced(self, name: str) -> bool:
        """Return whether a trainer replaced the schedule ``name``, or a method that executes its instructions; log
        once which."""
        used, default = self._INSTRUCTION_MAP, DEFAULT_INSTRUCTIONS
        found = [kind.__name__ for kind, do in default.items() if used.get(kind) is not do]
        names = ("_exec_schedule", *(do.__name__ for do in default.values()))
        kind, here, own = type(self), vars(self), vars(InstructionExecutor)
        found += [each for each in names if each in here or getattr(kind, each) is not own[each]]
        if schedule.replaced(name) and self.layout.chunks == 1:
            found.append(f"schedule.{name}")
        if found and not self._said_replaced:
            self._said_replaced = True
            log_dist(
                f"{', '.join(found)} replaced: batches follow schedule.{name} instruction by instruction, whatever "
                "pipeline.schedule says",
                ranks=[0],
            )
        return bool(found)

    def _exec_schedule(self, pipe_schedule: PipeSchedule) -> None:
        """Execute this stage's instructions, step by step. Every stage calls it, with the same class of schedule.

        PipelineError: an instruction missing from ``_INSTRUCTION_MAP``, or a stage with several chunks.
        """
        if self.layout.chunks > 1:
            raise PipelineError(
                f"instructions run on {type(self.stage_module).__name__}s with one chunk per stage: set "
                "chunks=1, or choose pipeline.schedule in the config"
            )
        core = self.core if torch.is_grad_enabled() else None
        if core is not None:
            self._check_batch_begins()
            self._batch_losses.begin_batch()
            core.reducer.pause_sums()  # replicas sum at ReduceGrads
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.fwd_outputs, self._results, self._mean = [], [], None
        self.loss = self.grad_layer = None
        self._stage_channels.begin()
        try:
            for step in pipe_schedule:
                for instruction in step:
                    self._exec_instruction(instruction)
            self._channels[0].flush()
        except BaseException as error:
            self._pipe_buffers = {}
            if core is not None:
                self.abandon_update(error)
            raise
        finally:
            self._buffer_states, self._instruction = {}, None
            if core is not None:
                core.reducer.resume_sums()

    def _exec_instruction(self, instruction: PipeInstruction) -> None:
        kind = type(instruction)
        do = self._INSTRUCTION_MAP.get(kind)
        if do is None:
            raise PipelineError(
                f"{type(self).__name__} does not understand {instruction!r}: add a function for "
                f"{kind.__name__} to PipelineEngine._INSTRUCTION_MAP"
            )
        method = getattr(self, do.__name__) if do is DEFAULT_INSTRUCTIONS.get(kind) else MethodType(do, self)
        timer = self.timers(TIMERS[kind]) if kind in TIMERS and self.wall_clock_breakdown() else None
        self._instruction = instruction
        buffer = instruction.kwargs.get("buffer_id")
        if buffer in self._buffer_states:
            self.loss, self.grad_layer = self._buffer_states[buffer]
        before = self.loss
        if timer is not None:
            timer.start()
        method(**instruction.kwargs)
        if timer is not None:
            timer.stop()
        if self.loss is not before:
            self._results.append(without_graph(self.loss))
        if buffer is not None:
            self._buffer_states[buffer] = (self.loss, self.grad_layer)

    def _train_by_instructions(self) -> Tensor:
        """Return the mean loss of a batch, fp32 [], on every rank."""
        self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
        return self._mean_of_batch()

    def _evaluate_by_instructions(self, micro_batches: int, return_logits: bool) -> list[Any]:
        """Return the result of each micro-batch, on the last stage."""
        self.eval_return_logits = return_logits
        self._exec_schedule(schedule.InferenceSchedule(micro_batches, self.num_stages, self.stage_id))
        return self._results

    def _mean_of_batch(self) -> Tensor:
        """Return the mean loss over micro-batches and replicas. Collective over all ranks, once per batch."""
        if self._mean is None:
            self._mean = self.agreed_loss = self._batch_losses.agree(self._results, self.micro_batches)
        return self._mean

    # Instructions ---------------------------------------------------------------------------------------------

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        inputs, labels = self._stage.load()
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = inputs
        if self.has_loss:
            self.pipe_buffers["labels"][buffer_id] = labels

    def _exec_recv_activations(self, buffer_id: int) -> None:
        inlet = self._channels[0].inputs
        if inlet is not None:
            self.pipe_buffers["inputs"][buffer_id] = inlet.receive()

    def _exec_forward_pass(self, buffer_id: int) -> None:
        buffers = self.pipe_buffers
        inputs = buffers["inputs"][buffer_id]
        outputs = self._stage.layers_forward(writable(inputs) if torch.is_grad_enabled() else inputs)
        buffers["outputs"][buffer_id] = outputs
        if self.has_loss:
            self.loss = self._stage.loss_of(outputs, buffers["labels"][buffer_id])
            self.fwd_outputs.append(without_graph(self.loss))

    def _exec_send_activations(self, buffer_id: int) -> None:
        outlet = self._channels[0].outputs
        if outlet is not None:
            outlet.send(self.pipe_buffers["outputs"][buffer_id])

    def _exec_recv_grads(self, buffer_id: int) -> None:
        inlet = self._channels[0].output_gradients
        if inlet is not None:
            found = inlet.receive()
            alone = isinstance(self.pipe_buffers["outputs"][buffer_id], Tensor) and len(found) == 1
            self.grad_layer = found[0] if alone else found

    def _exec_backward_pass(self, buffer_id: int) -> None:
        outputs = self.pipe_buffers["outputs"]
        gradients = (self.grad_layer,) if isinstance(self.grad_layer, Tensor) else self.grad_layer or ()
        result = self.loss if self.has_loss else outputs[buffer_id]
        self._stage.backward_stage(Action(ActionKind.BACKWARD, buffer_id), result, gradients)
        outputs[buffer_id] = self.grad_layer = None
        self._stage.count_micro_batch()

    def _exec_send_grads(self, buffer_id: int) -> None:
        outlet, inputs = self._channels[0].input_gradients, self.pipe_buffers["inputs"]
        if outlet is not None:
            outlet.send(tuple(t.grad for t in tensors_in(inputs[buffer_id]) if t.requires_grad))
        inputs[buffer_id] = None

    def _exec_reduce_tied_grads(self) -> None:
        """Do nothing: tied gradients are summed together with all others."""

    def _exec_reduce_grads(self) -> None:
        reducer = self._require_core("train_batch").reducer
        reducer.resume_sums()
        reducer.finish()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        InstructionExecutor._exec_reduce_grads(self)  # in case the schedule has no ReduceGrads
        self._mean_of_batch()
        while not self.clock.at_boundary:  # micro-batches whose backward did not pass through the engine
            super().step()
        super().step(lr_kwargs)

    # For a trainer's instructions -----------------------------------------------------------------------

    def _reserve_pipe_buffers(self, num_buffers: int) -> None:
        """Grow ``pipe_buffers`` to at least ``num_buffers`` slots."""
        for name in BUFFERS:
            places = self._pipe_buffers.setdefault(name, [])
            places += [None] * (num_buffers - len(places))

    @property
    def num_pipe_buffers(self) -> int:
        return len(self._pipe_buffers.get("inputs", ()))

    def position_in_batch(self) -> str:
        if self._instruction is None:
            return self._stage.position()
        return f"stage {self.stage_id}, {self._instruction!r}"

    def mem_status(self, msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
        """Print the memory in use, if ``memory_breakdown`` is set, and reset its peaks, on rank 0."""
        see_memory_usage(msg, force=bool(self.memory_breakdown()))

    def _begin_plain_backward(self) -> None:
        """Begin a backward that an instruction started itself. Gradients from the next stage are already scaled."""
        if self.has_loss:
            return super()._begin_plain_backward()
        core = self._require_core("backward")
        self._recover()
        self._network.phase = "backward"
        self.events.emit("before_backward", loss=None)
        core.reducer.before_backward()
        core.reducer.launch_at_end()
        return None


def _no_gradient(number: int, grad: Tensor) -> None:
    """Drop a gradient: an engine without an optimizer only evaluates."""


DEFAULT_INSTRUCTIONS: dict[type[PipeInstruction], Callable[..., Any]] = {
    schedule.OptimizerStep: InstructionExecutor._exec_optimizer_step,
    schedule.ReduceGrads: InstructionExecutor._exec_reduce_grads,
    schedule.ReduceTiedGrads: InstructionExecutor._exec_reduce_tied_grads,
    schedule.LoadMicroBatch: InstructionExecutor._exec_load_micro_batch,
    schedule.ForwardPass: InstructionExecutor._exec_forward_pass,
    schedule.BackwardPass: InstructionExecutor._exec_backward_pass,
    schedule.SendActivation: InstructionExecutor._exec_send_activations,
    schedule.RecvActivation: InstructionExecutor._exec_recv_activations,
    schedule.SendGrad: InstructionExecutor._exec_send_grads,
    schedule.RecvGrad: InstructionExecutor._exec_recv_grads,
}
InstructionExecutor._INSTRUCTION_MAP = dict(DEFAULT_INSTRUCTIONS)
