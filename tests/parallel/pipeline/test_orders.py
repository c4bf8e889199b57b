"""Orders of a pipeline: complete, free of deadlock, with the bubble and the memory that their formulas say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.parallel.pipeline.schedules.choice import OrderChoice, ScheduleLayout
from deepspeed.parallel.pipeline.schedules.diagram import picture
from deepspeed.parallel.pipeline.schedules.orders import (
    TYPICAL,
    Action,
    ActionKind,
    DeadlockError,
    Durations,
    Order,
    forward_only,
    interleaved,
    one_forward_one_backward,
    simulate,
)
from deepspeed.parallel.pipeline.schedules.zero_bubble import zero_bubble

zero_bubble_v = partial(zero_bubble, chunks=2, zigzag=True)

SIZES = [(1, 1), (1, 3), (2, 1), (2, 8), (3, 7), (4, 8), (4, 2), (8, 16)]  # stages, micro-batches


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_one_forward_one_backward(stages: int, micro_batches: int) -> None:
    order = one_forward_one_backward(stages, micro_batches)
    found = simulate(order)
    assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert [order.held(stage) for stage in range(stages)] == [
        min(stages - stage, micro_batches) for stage in range(stages)
    ]


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (1, 4, 2)])
def test_interleaved(stages: int, micro_batches: int, chunks: int) -> None:
    """The bubble is that of 1F1B, of which each part is ``chunks`` times smaller."""
    found = simulate(interleaved(stages, micro_batches, chunks))
    idle = (stages - 1) / chunks
    assert found.bubble == pytest.approx(idle / (micro_batches + idle))
    with pytest.raises(ValueError, match="a multiple of 3"):
        interleaved(3, 4, 2)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("make", [zero_bubble, zero_bubble_v])
def test_split_backwards_hold_what_1f1b_holds(make: object, stages: int, micro_batches: int) -> None:
    order: Order = make(stages, micro_batches)  # type: ignore[operator]
    assert order.split and max(order.held(s) for s in range(stages)) <= order.chunks * stages
    plain = simulate(one_forward_one_backward(stages, micro_batches), Durations(*[order.chunks] * 3))
    assert simulate(order).makespan <= plain.makespan
    for stage in order.actions:  # weights in the order of micro-batches: sums have the same bits
        for chunk in range(order.chunks):
            done = [a.micro_batch for a in stage if a.kind is ActionKind.WEIGHTS and a.chunk == chunk]
            assert done == sorted(done)


def test_bubbles_at_four_stages() -> None:
    """p = 4, m = 8. Waiting for the first micro-batch to arrive at the last stage remains: 3 of 51 units."""
    assert simulate(one_forward_one_backward(4, 8)).bubble == pytest.approx(3 / 11)
    assert simulate(zero_bubble(4, 8)).makespan == 3 * 8 + 3  # (p - 1) x (F + B - W), as the paper's ZB-H1
    assert simulate(zero_bubble_v(4, 8)).bubble == pytest.approx(3 / 51)


def test_the_bubble_of_more_chunks() -> None:
    """p = 4, m = 8: at most 3 % with the activations of 1F1B, waiting for the first micro-batch included."""
    order = zero_bubble_v(4, 8, chunks=6)
    assert simulate(order).bubble == pytest.approx(3 / 147) and simulate(order).bubble < 0.03
    assert max(order.held(stage) for stage in range(4)) <= 6 * one_forward_one_backward(4, 8).held(0)
    assert simulate(zero_bubble_v(4, 8, chunks=4)).bubble == pytest.approx(3 / 99)


@pytest.mark.parametrize(
    ("durations", "most"),
    [
        (TYPICAL, 0.03),
        (Durations(1.0, 1.5, 0.66), 0.03),
        (Durations(1.0, 1.1, 0.95), 0.03),
        (Durations(0.9, 1.1, 0.8, send=0.02), 0.04),  # of one chunk: it is sent eight times
    ],
)
def test_the_bubble_of_unequal_durations(durations: Durations, most: float) -> None:
    """A tenth of that of 1F1B, with its activations."""
    order = zero_bubble_v(4, 8, chunks=8, durations=durations)
    assert simulate(order, durations).bubble < most and max(map(order.held, range(4))) <= 8 * 4
    coarse = zero_bubble_v(4, 8, chunks=4, durations=durations)
    assert simulate(coarse, durations).bubble < 0.055


def test_orders_of_an_engine_that_has_measured_nothing() -> None:
    """They suit equal durations as well as those of transformers, where B takes longer than W."""
    order = OrderChoice("zero-bubble", ScheduleLayout(2)).order(8)
    for durations in (Durations(), TYPICAL, Durations(1.0, 1.5, 0.66), Durations(1.2, 1.0, 0.8)):
        assert simulate(order, durations).bubble < 0.07
    assert max(map(order.held, range(2))) == 2
    assert simulate(zero_bubble(2, 8), TYPICAL).bubble > 0.1
    order = OrderChoice("zero-bubble", ScheduleLayout(2), held=3).order(8)
    assert simulate(order, TYPICAL).bubble < 0.045 and order.held(0) == 3


def test_a_circle_is_found() -> None:
    order = one_forward_one_backward(2, 2)
    first = (
        Action(ActionKind.FORWARD, 0),
        Action(ActionKind.BACKWARD, 0),
        *order.actions[0][1:2],
        Action(ActionKind.BACKWARD, 1),
    )
    last = (
        Action(ActionKind.FORWARD, 0),
        Action(ActionKind.FORWARD, 1),
        Action(ActionKind.BACKWARD, 0),
        Action(ActionKind.BACKWARD, 1),
    )
    with pytest.raises(DeadlockError, match="stage 0 at B0, stage 1 at F1"):
        simulate(replace(order, actions=(first, last)))
    with pytest.raises(ValueError, match="stage 1 lacks or misplaces"):
        replace(order, actions=(order.actions[0], order.actions[1][:-1])).check()


def test_a_picture() -> None:
    run = simulate(zero_bubble_v(2, 2))
    root = ElementTree.fromstring(picture([simulate(one_forward_one_backward(2, 2)), run]))
    boxes = [each for each in root.iter() if each.tag.endswith("rect")]
    # the ground, a row for each stage, 8 actions of the first order and 2 x 2 x 2 x 3 of the second, three colours
    assert len(boxes) == 1 + 2 + 2 + 8 + 24 + 3
    text = " ".join("".join(each.itertext()) for each in root.iter() if each.tag.endswith("text"))
    assert f"zero-bubble-v, 2 chunks per stage: {run.bubble:.1%} of the time is waiting" in text


def test_a_chart() -> None:
    assert simulate(forward_only(2, 2)).chart().splitlines() == [
        "stage 0:   F0   F1    .",
        "stage 1:    .   F0   F1",
    ]


def test_auto_without_processes() -> None:
    """Chunks that interleaved 1F1B cannot order, because 2 stages do not divide 3 micro-batches."""
    choice = OrderChoice("auto", ScheduleLayout(stages=2, chunks=2))
    assert [choice.order(3).name, choice.may_split, choice.timed] == ["zero-bubble", True, False]
    choice.phase = 2
    choice._known = None
    assert choice.timed and choice.order(4).name == "interleaved"
    assert choice.order(3).name == "zero-bubble" and not choice.timed
    with pytest.raises(DeepSpeedConfigError, match="zero-bubble-v' does not support .*one chunk"):
        OrderChoice("zero-bubble-v", ScheduleLayout(stages=2))
    assert OrderChoice("auto", ScheduleLayout(stages=1)).order(2).name == "1f1b"
