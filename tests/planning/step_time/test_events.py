"""The simulator of events against cases computed by hand, closed formulas, and the simulator of pipelines."""

from __future__ import annotations

import pytest

from deepspeed.parallel.pipeline.schedules.orders import (
    ActionKind,
    Durations,
    Order,
    one_forward_one_backward,
)
from deepspeed.parallel.pipeline.schedules.orders import simulate as simulate_stages
from deepspeed.parallel.pipeline.schedules.zero_bubble import zero_bubble
from deepspeed.planning.step_time.events import CircularTasks, Link, Task, simulate


def test_a_fork_and_a_join() -> None:
    """a (2) before b (3, the same worker) and x (4, a link); the end waits for both."""
    found = simulate(
        [Task("a", "c", 2), Task("b", "c", 3, (0,)), Task("x", "l", 4, (0,)), Task("end", "c", 1, (1, 2))], {}
    )
    assert found.starts == (0, 2, 2, 6)
    assert found.ends == (2, 5, 6, 7)
    assert found.makespan == 7
    assert (found.busy("c"), found.busy("l")) == (6, 4)
    assert found.critical_path() == [0, 2, 3]


def test_a_resource_serves_in_the_order_of_readiness() -> None:
    """Both need the link: the one that was given later is ready earlier."""
    found = simulate(
        [
            Task("long", "c", 5),
            Task("short", "d", 1),
            Task("late", "l", 2, (0,)),
            Task("early", "l", 7, (1,)),
        ],
        {},
    )
    assert found.starts[3] == 1
    assert found.starts[2] == 8
    assert found.ends[2] == 10
    assert found.critical_path() == [1, 3, 2]  # through the queue


def test_those_ready_at_the_same_time_keep_their_order() -> None:
    found = simulate([Task(str(i), "one", 1) for i in range(5)], {})
    assert found.starts == (0, 1, 2, 3, 4)


def test_a_latency_occupies_nothing() -> None:
    found = simulate(
        [Task("a", "l", 1, wait=10), Task("b", "l", 5, wait=2), Task("c", "l", 1, (1,), wait=1)], {}
    )
    assert found.starts == (10, 2, 8)
    assert found.makespan == 11


def test_a_link_carries_bytes() -> None:
    assert simulate([Task("a", "l", 100)], {"l": Link(10)}).makespan == 10


def test_a_token_bucket() -> None:
    """50 bytes pass at once, the next 50 at 10 per second; 3 seconds of rest save 30 for the next 40."""
    link = Link(10, burst=50, peak=1000)
    found = simulate([Task("a", "l", 100), Task("rest", "c", 3, (0,)), Task("b", "l", 40, (1,))], {"l": link})
    assert found.ends == (5, 8, 9)
    small = simulate([Task("a", "l", 20)], {"l": Link(10, burst=50, peak=1000)})
    assert small.makespan == pytest.approx(0.02)
    long_rest = [Task("a", "l", 0), Task("rest", "c", 1e6, (0,)), Task("b", "l", 150, (1,))]
    # No more than the burst is saved.
    assert simulate(long_rest, {"l": Link(10, 50, 1000)}).makespan == 1e6 + 10


def test_a_link_has_a_rate() -> None:
    with pytest.raises(ValueError, match="rate must be above 0"):
        Link(0)


def test_a_circle_is_an_error() -> None:
    with pytest.raises(CircularTasks, match=r"each other: a, b(\n|$)"):
        simulate([Task("a", "c", 1, (1,)), Task("b", "c", 1, (0,)), Task("free", "c", 1)], {})


def test_nothing_takes_no_time() -> None:
    found = simulate([], {})
    assert found.makespan == 0
    assert found.critical_path() == []


@pytest.mark.parametrize(("first", "second"), [(3.0, 2.0), (2.0, 3.0), (1.0, 1.0)])
def test_two_machines_in_a_row(first: float, second: float) -> None:
    """m pieces through two machines: the slower one works all the time, but for one piece of the other."""
    count = 6
    tasks = []
    for i in range(count):
        tasks.append(Task(f"first {i}", "first", first))
        tasks.append(Task(f"second {i}", "second", second, (2 * i,)))
    assert simulate(tasks, {}).makespan == first + second + (count - 1) * max(first, second)


@pytest.mark.parametrize("sums", [0.5, 2.0, 5.0])
def test_sums_beside_backward(sums: float) -> None:
    """Each of n calls takes 2 backward and starts a sum; the closed formula is that of two machines in a row."""
    count, each = 4, 2.0
    tasks, last = [], ()
    for i in range(count):
        tasks.append(Task(f"backward {i}", "compute", each, last))
        last = (2 * i,)
        tasks.append(Task(f"sum {i}", "link", sums, last))
    found = simulate([*tasks, Task("update", "compute", 1, tuple(range(len(tasks))))], {})
    assert found.makespan == each + sums + (count - 1) * max(each, sums) + 1


def test_enough_workers_leave_the_longest_chain() -> None:
    tasks = [Task("a", "1", 3), Task("b", "2", 1, (0,)), Task("c", "3", 4, wait=2), Task("d", "4", 1, (1, 2))]
    assert simulate(tasks, {}).makespan == 7


def tasks_of(order: Order, durations: Durations) -> list[Task]:
    """The same as tasks: an action after the one before it on its stage, and after what it needs of another."""
    numbers: dict[tuple[ActionKind, int, int], int] = {}
    rows: list[tuple[str, float, list[object]]] = []
    for stage, actions in enumerate(order.actions):
        before = None
        for action in actions:
            key = (action.kind, action.micro_batch, order.position(action.chunk, stage))
            needs: list[object] = [before]
            if action.kind is ActionKind.FORWARD and key[2] > 0:
                needs.append((ActionKind.FORWARD, action.micro_batch, key[2] - 1))
            if action.kind is ActionKind.BACKWARD and key[2] < order.stages * order.chunks - 1:
                needs.append((ActionKind.BACKWARD, action.micro_batch, key[2] + 1))
            numbers[key] = len(rows)
            rows.append((f"stage {stage}", durations.of(action, split=order.split), needs))
            before = key
    return [
        Task(resource, resource, work, tuple(numbers[need] for need in needs if need is not None))  # type: ignore[index]
        for resource, work, needs in rows
    ]


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_pipelines_by_the_other_simulator(micro_batches: int) -> None:
    durations = Durations(forward=1.0, backward=1.5, weights=0.75)
    for order in (one_forward_one_backward(4, micro_batches), zero_bubble(4, micro_batches)):
        expected = simulate_stages(order, durations).makespan
        assert simulate(tasks_of(order, durations), {}).makespan == pytest.approx(expected)
    plain = one_forward_one_backward(4, micro_batches)
    whole = simulate(tasks_of(plain, Durations(1, 1, 1)), {})
    assert whole.makespan == (micro_batches + 3) * 3  # (m + p - 1)(forward + backward)
