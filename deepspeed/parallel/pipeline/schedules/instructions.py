"""Schedules of one stage as lists of instructions per step: pure data, without communication or computation.

In each step a stage runs one forward or one backward of a micro-batch, and neighbours exchange the results of the
previous step. Exchanges within a step are ordered such that even blocking sends cannot deadlock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple


def _is_even(number: int) -> bool:
    return number % 2 == 0


def _is_odd(number: int) -> bool:
    return number % 2 != 0


class PipeInstruction:
    """One instruction of a stage. ``kwargs`` become attributes; instructions are equal if type and attributes are."""

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
    """Sum the gradients of tied weights over the stages that share them."""


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
    """Backpropagate through the layers of this stage."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next stage."""


class CommitP2P(PipeInstruction):
    """Launch the sends and receives queued since the last ``CommitP2P`` as one batch, and wait for them: in a schedule
    with this instruction, the send and receive instructions only queue."""


class PipeSchedule(ABC):
    """The instructions of stage ``stage_id`` of ``stages`` for a batch of ``micro_batches``.

    Iterating yields one list of instructions per step; all stages have the same number of steps.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if not 0 <= stage_id < stages:
            raise ValueError(f"stage_id={stage_id} is not in [0, {stages})")
        if micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches}: must be at least 1")
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield one list of instructions per step."""

    def num_pipe_buffers(self) -> int:
        """Return the maximum number of micro-batches that the stage holds at a time."""
        return self.micro_batches

    stage = property(attrgetter("stage_id"))
    num_stages = property(attrgetter("stages"))
    num_micro_batches = property(attrgetter("micro_batches"))

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        """Return whether the micro-batch exists; for custom schedules."""
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def _before_forward(self, buffer: int) -> list[PipeInstruction]:
        """Return the instructions that fill a buffer with inputs (and labels)."""
        found: list[PipeInstruction] = []
        if not self.is_first_stage:
            found.append(RecvActivation(buffer))
        if self.is_first_stage or self.is_last_stage:
            found.append(LoadMicroBatch(buffer))
        return found


class InferenceSchedule(PipeSchedule):
    """Forward only: micro-batch ``i`` is on stage ``s`` in step ``i + s``; its outputs are sent in the next step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            now = step - self.stage_id
            arrives = self._valid_micro_batch(now)
            instructions: list[PipeInstruction] = (
                self._before_forward(self._buffer_idx(now)) if arrives else []
            )
            if self._valid_micro_batch(now - 1) and not self.is_last_stage:
                send = SendActivation(self._buffer_idx(now - 1))
                # even stages send first, odd ones receive first, so that blocking sends cannot deadlock
                instructions.insert(0 if _is_even(self.stage_id) else len(instructions), send)
            if arrives:
                instructions.append(ForwardPass(self._buffer_idx(now)))
            yield instructions

    def num_pipe_buffers(self) -> int:
        """Return 2: one buffer to compute with, one still being sent."""
        return 2


class TrainSchedule(PipeSchedule):
    """One forward, one backward (1F1B; Narayanan et al.: PipeDream, SOSP 2019, with the flush of its 2021 successor).

    Stage ``s`` runs the forward of micro-batch ``i`` in step ``s + 2i`` and its backward in step
    ``2 stages - 1 - s + 2i``; so it holds at most ``stages - s`` micro-batches, and is idle in ``2 (stages - 1)`` of
    ``2 (micro_batches + stages - 1)`` steps.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        before = -1
        for step in range(last + 1):
            now, is_forward = self._step_to_micro_batch(step)
            sends, computes = self._valid_micro_batch(before), self._valid_micro_batch(now)
            instructions: list[PipeInstruction] = []
            if is_forward:  # the previous stage exchanges with this one
                if computes:
                    instructions += self._before_forward(self._buffer_idx(now))
                if sends and not self.is_first_stage:
                    instructions.append(SendGrad(self._buffer_idx(before)))
            else:
                if sends and not self.is_last_stage:
                    instructions.append(SendActivation(self._buffer_idx(before)))
                if computes and not self.is_last_stage:
                    instructions.append(RecvGrad(self._buffer_idx(now)))
            if computes:
                kind = ForwardPass if is_forward else BackwardPass
                instructions.append(kind(self._buffer_idx(now)))
            if step == last:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield instructions
            before = now

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches between forward and backward, at least two: one may still be in flight."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Return the micro-batch of a step (an invalid one if the stage is idle), and whether it is a forward step."""
        is_forward = _is_even(step_id - self.stage_id)
        first = self.stage_id if is_forward else 2 * self.stages - 1 - self.stage_id
        return (step_id - first) // 2, is_forward


class DataParallelSchedule(PipeSchedule):
    """Plain gradient accumulation on a single stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro_batch in range(self.micro_batches):
            instructions: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                instructions += [ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        return 1


class DualPipeVSchedule(PipeSchedule):
    """Two chunks of layers per stage, traversed back and forth: rank ``s`` of n has chunk ``s`` (``phase`` 0) and chunk
    ``2n - 1 - s`` (``phase`` 1), so the first rank both reads the data and computes the loss (DeepSeek-V3, 2024).

    In each step every rank computes at most one forward or backward, then queues its exchanges and commits. Both ends
    of a message are in the same step, and all ranks queue in the same order of channels, so they cannot deadlock.
    Backwards take precedence, and at most ``2n`` micro-batches are in flight. Micro-batch ``i`` of a phase has buffer
    ``phase * micro_batches + i``.

    ``forward_only``: evaluation. ValueError: fewer than ``2n`` micro-batches.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, forward_only: bool = False) -> None:
        super().__init__(micro_batches, stages, stage_id)
        check_dual_pipe(stages, micro_batches)
        self.forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        return 2 * self.micro_batches

    def steps(self) -> Iterator[list[PipeInstruction]]:
        rounds = list(_v_rounds(self.stages, self.micro_batches, self.forward_only))
        for number, done in enumerate(rounds):
            instructions = self._computed(done.get(self.stage_id))
            exchanged = self._exchanged(done)
            if exchanged:
                instructions += [*exchanged, CommitP2P()]
            if number == len(rounds) - 1 and not self.forward_only:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield instructions

    def _computed(self, own: _Computation | None) -> list[PipeInstruction]:
        if own is None:
            return []
        buffer = own.phase * self.micro_batches + own.micro_batch
        if own.is_backward:
            return [BackwardPass(buffer, phase=own.phase)]
        reads = self.is_first_stage and own.phase == 0
        return [*([LoadMicroBatch(buffer)] if reads else []), ForwardPass(buffer, phase=own.phase)]

    def _exchanged(self, done: dict[int, _Computation]) -> list[PipeInstruction]:
        """Return the sends and receives of this stage for what all stages have computed."""
        found: list[tuple[tuple[bool, int, int], PipeInstruction]] = []
        for sender, made in done.items():
            onward = (made.phase == 0) is not made.is_backward  # to the next rank
            receiver = sender + (1 if onward else -1)
            if not self._valid_stage(receiver) or self.stage_id not in (sender, receiver):
                continue  # the ends of the pipeline, and the last rank, which keeps its output for its second chunk
            kinds = (SendGrad, RecvGrad) if made.is_backward else (SendActivation, RecvActivation)
            buffer = made.phase * self.micro_batches + made.micro_batch
            instruction = kinds[self.stage_id == receiver](buffer, phase=made.phase)
            found.append(((made.is_backward, made.phase, sender), instruction))
        return [instruction for _, instruction in sorted(found, key=lambda pair: pair[0])]


_OURS = {kind.__name__: (kind, kind.steps) for kind in (TrainSchedule, InferenceSchedule)}


def replaced(name: str) -> bool:
    """Return whether a trainer has monkey-patched the schedule ``name`` or its ``steps``."""
    kind, steps = _OURS[name]
    return globals()[name] is not kind or kind.steps is not steps


def check_dual_pipe(stages: int, micro_batches: int) -> None:
    """Raise ValueError if there are too few micro-batches for DualPipeV."""
    if micro_batches < 2 * stages:
        raise ValueError(
            f"DualPipeV over {stages} stages needs at least {2 * stages} micro-batches, not {micro_batches}: raise "
            "gradient_accumulation_steps (or num_micro_batches)"
        )


class _Computation(NamedTuple):
    is_backward: bool
    phase: int
    micro_batch: int


def _v_rounds(stages: int, micro_batches: int, forward_only: bool) -> Iterator[dict[int, _Computation]]:
    """Yield the computation of each stage, round by round: the first one that is ready, backwards before forwards."""
    last = stages - 1
    kinds = [(kind, phase) for kind in (True, False) for phase in (1, 0)]
    following = {
        (stage, *kind): 0 for stage in range(stages) for kind in kinds
    }  # the next micro-batch of each kind: micro-batches stay in order
    done: set[tuple[int, _Computation]] = set()

    def is_ready(stage: int, what: _Computation) -> bool:
        micro_batch = what.micro_batch
        if what == (False, 0, micro_batch) and stage == 0:
            left = (0, False, 1) if forward_only else (0, True, 0)
            return micro_batch - following[left] < 2 * stages
        if what == (True, 1, micro_batch) and stage == 0:
            return (0, _Computation(False, 1, micro_batch)) in done
        turns = stage == last and what.phase != what.is_backward
        if turns:
            return (last, _Computation(what.is_backward, 1 - what.phase, micro_batch)) in done
        before = stage + (-1 if (what.phase == 0) is not what.is_backward else 1)
        return (before, what) in done

    total = stages * micro_batches * (2 if forward_only else 4)
    while len(done) < total:
        now: dict[int, _Computation] = {}
        for stage in range(stages):
            for kind in kinds[2:] if forward_only else kinds:
                what = _Computation(*kind, following[(stage, *kind)])
                if what.micro_batch < micro_batches and is_ready(stage, what):
                    now[stage] = what
                    break
        for stage, what in now.items():
            following[stage, what.is_backward, what.phase] += 1
            done.add((stage, what))
        yield now
