"""Schedules of one stage as pure lists of instructions, step by step: nothing here communicates or computes.

A schedule is seen from one stage. In each step the stages of a pipeline do one forward or one backward of a
micro-batch, and neighbours exchange what the step before produced. The order of exchanges within a step is such that
even sends that wait for their receiver cannot wait in a circle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]


class PipeInstruction:
    """One thing that a stage does. ``kwargs`` become attributes; equal if type and attributes are."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.kwargs == self.kwargs  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.kwargs.items())))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights: the last instruction of a batch."""


class ReduceGrads(PipeInstruction):
    """Sum the gradients of this stage over its replicas."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of weights that several stages share over these stages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for the micro-batch in buffer ``buffer_id``."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read the next micro-batch: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Run the layers of this stage."""


class BackwardPass(BufferOpInstruction):
    """Back-propagate through the layers of this stage."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next stage."""


class PipeSchedule(ABC):
    """The instructions of stage ``stage_id`` of ``stages`` for a batch of ``micro_batches``.

    Iterating gives one list of instructions per step; all stages have the same number of steps.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if not 0 <= stage_id < stages:
            raise ValueError(f"stage_id={stage_id} is not one of {stages} stages")
        if micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches}: a batch has at least one")
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """One list of instructions per step."""

    def num_pipe_buffers(self) -> int:
        """How many micro-batches the stage holds at a time, at most."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        """For schedules of one's own."""
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer(self, micro_batch: int) -> int:
        return micro_batch % self.num_pipe_buffers()

    def _before_forward(self, buffer: int) -> list[PipeInstruction]:
        """What brings inputs (and labels) into a buffer."""
        found: list[PipeInstruction] = []
        if not self.is_first_stage:
            found.append(RecvActivation(buffer))
        if self.is_first_stage or self.is_last_stage:
            found.append(LoadMicroBatch(buffer))
        return found


class InferenceSchedule(PipeSchedule):
    """Forward only: micro-batch ``i`` is on stage ``s`` in step ``i + s``."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            micro_batch = step - self.stage_id
            if not 0 <= micro_batch < self.micro_batches:
                yield []
                continue
            buffer = self._buffer(micro_batch)
            instructions = [*self._before_forward(buffer), ForwardPass(buffer)]
            if not self.is_last_stage:
                instructions.append(SendActivation(buffer))
            yield instructions

    def num_pipe_buffers(self) -> int:
        """One to compute with, one that is still being sent."""
        return 2


class TrainSchedule(PipeSchedule):
    """One forward, one backward (1F1B; Narayanan et al.: PipeDream, SOSP 2019, with the flush of its 2021 successor).

    Stage ``s`` does the forward of micro-batch ``i`` in step ``s + 2i`` and its backward in step
    ``2 stages - 1 - s + 2i``; so it holds at most ``stages - s`` micro-batches, and is idle in ``2 (stages - 1)`` of
    ``2 (micro_batches + stages - 1)`` steps.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        for step in range(last + 1):
            instructions: list[PipeInstruction] = []
            forward, backward = self._forward_in(step), self._backward_in(step)
            if (step - self.stage_id) % 2 == 0:  # the previous stage exchanges with this one
                if forward is not None:
                    instructions += self._before_forward(self._buffer(forward))
                done = self._backward_in(step - 1)
                if done is not None and not self.is_first_stage:
                    instructions.append(SendGrad(self._buffer(done)))
                if forward is not None:
                    instructions.append(ForwardPass(self._buffer(forward)))
            else:
                done = self._forward_in(step - 1)
                if done is not None and not self.is_last_stage:
                    instructions.append(SendActivation(self._buffer(done)))
                if backward is not None:
                    if not self.is_last_stage:
                        instructions.append(RecvGrad(self._buffer(backward)))
                    instructions.append(BackwardPass(self._buffer(backward)))
            if step == last:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        """The micro-batches between forward and backward, and at least two, so that one can be sent meanwhile."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _forward_in(self, step: int) -> int | None:
        return self._micro_batch(step - self.stage_id)

    def _backward_in(self, step: int) -> int | None:
        return self._micro_batch(step - (2 * self.stages - 1 - self.stage_id))

    def _micro_batch(self, steps_since_first: int) -> int | None:
        number, odd = divmod(steps_since_first, 2)
        return number if not odd and 0 <= number < self.micro_batches else None


class DataParallelSchedule(PipeSchedule):
    """Plain accumulation on a single stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro_batch in range(self.micro_batches):
            instructions: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                instructions += [ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        return 1
