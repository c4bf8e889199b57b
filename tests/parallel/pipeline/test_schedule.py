"""The documented schedules, followed by hand and by stages that wait for each other's messages."""

from __future__ import annotations

from collections import Counter

import pytest

from deepspeed.parallel.pipeline.schedules.instructions import (
    BackwardPass,
    CommitP2P,
    DataParallelSchedule,
    DualPipeVSchedule,
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
        sent = [n for n, step in enumerate(steps) if any(isinstance(i, SendActivation) for i in step)]
        assert sent == ([] if own.is_last_stage else [n + 1 for n in where])
        assert not any(isinstance(i, (BackwardPass, SendGrad, RecvGrad)) for step in steps for i in step)
    meet([InferenceSchedule(micro_batches, stages, stage) for stage in range(stages)])


def meet_in_commits(schedules: list[DualPipeVSchedule]) -> list[list[tuple[str, int, int]]]:
    """Run all stages, of which each waits at a commit until the other end of every message is announced; what each
    computed."""
    stages, count = len(schedules), schedules[0].micro_batches
    todo = [[instruction for step in own for instruction in step] for own in schedules]
    position, computed = [0] * stages, [[] for _ in schedules]
    announced: dict[
        tuple[str, int, int], list[list[int]]
    ] = {}  # (what, from, to): micro-batches at both ends
    waits: list[list[tuple[tuple[str, int, int], int, int, int]]] = [[] for _ in schedules]
    here: list[set[tuple[str, int]]] = [set() for _ in schedules]

    def do(stage: int, now: PipeInstruction) -> bool:
        at_ends = (stage == 0, stage == stages - 1)
        if isinstance(now, CommitP2P):
            if not all(len(announced[channel][1 - end]) > place for channel, end, place, _ in waits[stage]):
                return False
            for channel, end, place, buffer in waits[stage]:
                assert announced[channel][0][place] == announced[channel][1][place]
                here[stage] |= {(channel[0], buffer)} if end else set()
            waits[stage] = []
        elif isinstance(now, LoadMicroBatch):
            here[stage].add(("activation", now.buffer_id))
        elif isinstance(now, ForwardPass):
            turned = at_ends[1] and now.phase == 1  # type: ignore[attr-defined]
            source = ("forward", now.buffer_id - count) if turned else ("activation", now.buffer_id)
            assert source in here[stage]
            here[stage].add(("forward", now.buffer_id))
        elif isinstance(now, BackwardPass):
            turned, has_loss = at_ends[1] and not now.phase, at_ends[0] and now.phase  # type: ignore[attr-defined]
            source = ("backward", now.buffer_id + count) if turned else ("gradient", now.buffer_id)
            assert ("forward", now.buffer_id) in here[stage] and (has_loss or source in here[stage])
            here[stage].add(("backward", now.buffer_id))
        elif isinstance(now, (SendActivation, RecvActivation, SendGrad, RecvGrad)):
            sends, forth = isinstance(now, (SendActivation, SendGrad)), isinstance(now, TO_NEXT)
            what, made = ("activation", "forward") if forth else ("gradient", "backward")
            assert not sends or (made, now.buffer_id) in here[stage]
            toward = 1 if (now.phase == 0) is forth else -1  # type: ignore[attr-defined]
            ends = (stage, stage + toward) if sends else (stage - toward, stage)
            both = announced.setdefault((what, *ends), [[], []])[not sends]
            waits[stage].append(((what, *ends), int(not sends), len(both), now.buffer_id))
            both.append(now.buffer_id)
        if isinstance(now, (ForwardPass, BackwardPass)):
            computed[stage].append((now.name, now.phase, now.buffer_id % count))  # type: ignore[attr-defined]
        return True

    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(todo):
            while position[stage] < len(own) and do(stage, own[position[stage]]):
                position[stage] += 1
                moved = True
    assert position == [len(own) for own in todo], "stages wait for each other"
    assert not any(waits)
    return computed


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 13)])
def test_dual_pipe_goes_forth_and_back(stages: int, micro_batches: int, forward_only: bool) -> None:
    schedules = [
        DualPipeVSchedule(micro_batches, stages, stage, forward_only=forward_only) for stage in range(stages)
    ]
    kinds = ["ForwardPass"] if forward_only else ["ForwardPass", "BackwardPass"]
    expected = {(kind, phase, i) for kind in kinds for phase in (0, 1) for i in range(micro_batches)}
    for own in meet_in_commits(schedules):
        assert set(own) == expected and len(own) == len(expected)
    assert len({len(list(own)) for own in schedules}) == 1
    assert schedules[0].num_pipe_buffers() == 2 * micro_batches
    last = list(schedules[0])[-1]
    assert (last[-3:] == [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]) is not forward_only


def test_dual_pipe_needs_enough_micro_batches() -> None:
    with pytest.raises(
        ValueError, match="at least 6 micro-batches, not 5: raise gradient_accumulation_steps"
    ):
        DualPipeVSchedule(5, 3, 0)


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


def test_wrong_numbers() -> None:
    with pytest.raises(ValueError, match=r"stage_id=2 is not in \[0, 2\)"):
        TrainSchedule(4, 2, 2)
    with pytest.raises(ValueError, match="micro_batches=0"):
        TrainSchedule(0, 2, 1)
