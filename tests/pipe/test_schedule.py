"""The documented schedules, followed by hand and by stages that wait for each other's messages."""

from __future__ import annotations

from collections import Counter

import pytest

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
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
)

SIZES = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 8), (4, 4), (5, 3)]  # stages, micro-batches
TO_NEXT, TO_PREVIOUS = (SendActivation, RecvActivation), (SendGrad, RecvGrad)


def meet(schedules: list[PipeSchedule]) -> None:
    """Run all stages with sends that wait for their receiver."""
    todo = [[instruction for step in own for instruction in step] for own in schedules]
    position = [0] * len(todo)

    def current(stage: int) -> PipeInstruction | None:
        if not 0 <= stage < len(todo) or position[stage] == len(todo[stage]):
            return None
        return todo[stage][position[stage]]

    moved = True
    while moved:
        moved = False
        for stage in range(len(todo)):
            now = current(stage)
            if now is None or isinstance(now, (RecvActivation, RecvGrad)):
                continue
            if isinstance(now, (SendActivation, SendGrad)):
                other = stage + (1 if isinstance(now, SendActivation) else -1)
                expected = RecvActivation if isinstance(now, SendActivation) else RecvGrad
                if not isinstance(current(other), expected):
                    continue
                position[other] += 1
            position[stage] += 1
            moved = True
    assert position == [len(own) for own in todo], "stages wait for each other"


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_training_is_one_forward_one_backward(stages: int, micro_batches: int) -> None:
    schedules: list[PipeSchedule] = [TrainSchedule(micro_batches, stages, stage) for stage in range(stages)]
    meet(schedules)
    for own in schedules:
        steps = list(own)
        assert len(steps) == 2 * (micro_batches + stages - 1)
        counts = Counter(type(instruction) for step in steps for instruction in step)
        assert counts[ForwardPass] == counts[BackwardPass] == micro_batches
        assert counts[SendActivation] == counts[RecvGrad] == (0 if own.is_last_stage else micro_batches)
        assert counts[RecvActivation] == counts[SendGrad] == (0 if own.is_first_stage else micro_batches)
        assert counts[LoadMicroBatch] == (micro_batches if own.is_first_stage or own.is_last_stage else 0)
        assert steps[-1][-3:] == [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
        busy = [step for step in steps if any(isinstance(i, (ForwardPass, BackwardPass)) for i in step)]
        assert len(steps) - len(busy) == 2 * (stages - 1)  # the bubble
        held: set[int] = set()
        for step in steps:
            for instruction in step:
                if isinstance(instruction, ForwardPass):
                    assert instruction.buffer_id not in held
                    held.add(instruction.buffer_id)
                    assert len(held) <= min(stages - own.stage, micro_batches)
                elif isinstance(instruction, BackwardPass):
                    held.remove(instruction.buffer_id)
        assert own.num_pipe_buffers() == max(2, min(stages - own.stage, micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_evaluation_only_goes_forward(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        own = InferenceSchedule(micro_batches, stages, stage)
        steps = list(own)
        assert len(steps) == micro_batches + stages - 1 and own.num_pipe_buffers() == 2
        where = [n for n, step in enumerate(steps) if any(isinstance(i, ForwardPass) for i in step)]
        assert where == list(range(stage, stage + micro_batches))
        assert not any(isinstance(i, (BackwardPass, SendGrad, RecvGrad)) for step in steps for i in step)
    meet([InferenceSchedule(micro_batches, stages, stage) for stage in range(stages)])


def test_one_stage_accumulates() -> None:
    own = DataParallelSchedule(2, 1, 0)
    once = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
    assert list(own) == [once, [*once, ReduceGrads(), OptimizerStep()]]
    assert own.num_pipe_buffers() == 1
    assert (own.num_micro_batches, own.num_stages, own.stage) == (2, 1, 0)


def test_instructions_are_values() -> None:
    assert repr(ForwardPass(3)) == "ForwardPass(buffer_id=3)" and ForwardPass(3) == ForwardPass(3)
    assert ForwardPass(3) != ForwardPass(2) and ForwardPass(3) != BackwardPass(3)
    custom = PipeInstruction(one=1)
    assert (custom.one, custom.name, custom.kwargs) == (1, "PipeInstruction", {"one": 1})  # type: ignore[attr-defined]
    assert len({SendGrad(0), SendGrad(0), SendGrad(1)}) == 2
    assert all(hasattr(schedule, name) for name in schedule.__all__)


def test_wrong_numbers() -> None:
    with pytest.raises(ValueError, match="stage_id=2 is not one of 2 stages"):
        TrainSchedule(4, 2, 2)
    with pytest.raises(ValueError, match="micro_batches=0"):
        TrainSchedule(0, 2, 1)
