"""The owner of "when is a bucket whole", alone: its states, its holders, and what it refuses. No ranks."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_bucket import Status
from deepspeed.zero.gathering.transitions import LiveBudget, TransitionError, Transitions

NUMEL = 10


class Bucket:
    """The memory of a bucket, without memory."""

    def __init__(self, persistent: bool = False) -> None:
        self.layout = SimpleNamespace(padded_numel=NUMEL)
        self.persistent = persistent
        self.lossy = False
        self.status = Status.GATHERED if persistent else Status.SHARDED

    def allocate(self) -> torch.Tensor:
        self.status = Status.GATHERING
        return torch.empty(0)

    def arrived(self) -> None:
        self.status = Status.GATHERED

    def reshard(self) -> None:
        assert self.status is Status.GATHERED
        self.status = Status.SHARDED


class Transport:
    """Gathers complete immediately; ``log`` records the calls."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.fails = False

    def connect(self, transitions: Transitions) -> None:
        self.transitions = transitions

    def gather(self, index: int, phase: Phase) -> None:
        self.log.append((phase.name, index))
        if self.transitions.buckets[index].status is Status.SHARDED:  # else it was begun ahead
            self.transitions.begin(index)
        self.transitions.arrived(index)
        if self.fails:
            raise ConnectionError("a rank is gone")

    def begin_pass(self, phase: Phase, root: Any) -> None:
        self.log.append(("begin", phase.name))

    def end_pass(self, phase: Phase) -> None:
        self.log.append(("end", phase.name))

    def finish(self, index: int) -> None:
        self.log.append(("finish", index))

    def resharded(self, index: int) -> None:
        self.log.append(("resharded", index))


def make(count: int = 3, *, live: int = 0, reuse: int = 0, persistent: tuple[int, ...] = ()) -> Any:
    buckets: Any = [Bucket(b in persistent) for b in range(count)]
    transport = Transport()
    return Transitions(buckets, transport, LiveBudget(max_live=live, max_reuse=reuse)), transport


def whole(transitions: Transitions) -> list[int]:
    return [b for b, bucket in enumerate(transitions.buckets) if bucket.status is Status.GATHERED]


def test_a_step_holds_what_it_uses_and_nothing_else() -> None:
    transitions, transport = make()
    for _ in range(2):
        transitions.begin_pass(Phase.FORWARD, 0)
        for b in (0, 1, 2):
            transitions.take([b], Phase.FORWARD)
            assert whole(transitions) == [b]
            transitions.release([b])
        transitions.end_pass(Phase.FORWARD)
        assert whole(transitions) == [2]  # idle, and kept: backward often begins with it
        transitions.begin_backward()
        for b in (2, 1, 0):
            transitions.take([b], Phase.BACKWARD)
            transitions.need([b], Phase.BACKWARD)  # another output of the same call
            assert whole(transitions) == [b]
            transitions.release([b])
        transitions.end_backward()
        assert whole(transitions) == []
        transitions.end_of_step()
    gathers = [entry for entry in transport.log if entry[0] in ("FORWARD", "BACKWARD")]
    assert gathers == 2 * [*(("FORWARD", b) for b in (0, 1, 2)), ("BACKWARD", 1), ("BACKWARD", 0)]


def test_several_holders_keep_a_bucket() -> None:
    transitions, _ = make()
    transitions.hold(0)
    transitions.begin_pass(Phase.EVALUATION, 0)
    assert transitions.evaluating
    transitions.take([0, 1], Phase.EVALUATION)
    transitions.release([0, 1])
    transitions.end_pass(Phase.EVALUATION)
    assert not transitions.evaluating
    assert whole(transitions) == [0]  # the end of an evaluation releases what is idle
    transitions.reshard_all()
    assert whole(transitions) == [0]
    transitions.release_hold(0)
    assert whole(transitions) == []


def test_a_call_never_loses_a_bucket_to_another_that_it_needs_too() -> None:
    """Bucket 1 is idle when a call takes 0 and 1: making room for 0 must not release it."""
    transitions, transport = make()
    transitions.take([1], Phase.FORWARD)
    transitions.release([1])
    transitions.take([0, 1], Phase.FORWARD)
    assert transport.log == [("FORWARD", 1), ("FORWARD", 0)]
    assert whole(transitions) == [0, 1]


@pytest.mark.parametrize(("live", "kept"), [(0, [2]), (3 * NUMEL, [0, 2]), (10**9, [0, 2])])
def test_the_budget_keeps_what_is_used_again_soon(live: int, kept: list[int]) -> None:
    """Bucket 0 is used again after ten elements, bucket 1 not at all."""
    transitions, _ = make(live=live, reuse=2 * NUMEL)
    for _ in range(2):
        for b in (0, 1, 2, 0):
            transitions.take([b], Phase.FORWARD)
            if b == 2:
                last = whole(transitions)
            transitions.release([b])
        for b in range(3):
            transitions.evict(b)
        transitions.end_of_step()
    assert last == kept


def test_with_room_for_everything_nothing_is_resharded_but_what_is_stale() -> None:
    transitions, transport = make(live=3 * NUMEL, reuse=3 * NUMEL)
    assert transitions.fits_budget
    transitions.take([0, 1], Phase.FORWARD)
    transitions.release([0, 1])
    transitions.hold(2)
    transitions.release_hold(2)
    transitions.begin_backward()
    transitions.end_backward()
    assert whole(transitions) == [0, 1, 2]
    transitions.evict_stale(1)
    assert whole(transitions) == [0, 2]
    assert ("resharded", 1) not in transport.log  # the update is not part of the order of gathers
    transitions.reshard_all()
    assert whole(transitions) == []


def test_a_step_begins_without_what_an_evaluation_left() -> None:
    transitions, _ = make(live=10**9, reuse=0)
    transitions.take([0], Phase.MANUAL)
    transitions.release([0])
    transitions.begin_pass(Phase.EVALUATION, 0)
    transitions.begin_pass(Phase.FORWARD, 0)  # for example on another thread than the evaluation
    assert whole(transitions) == []
    transitions.take([1], Phase.EVALUATION)
    transitions.release([1])
    transitions.take([2], Phase.FORWARD)
    transitions.end_pass(Phase.FORWARD)
    transitions.begin_pass(Phase.FORWARD, 0)  # within the step
    assert 2 in whole(transitions)


def test_persistent_buckets_are_always_whole() -> None:
    transitions, transport = make(persistent=(0,))
    transitions.take([0], Phase.FORWARD)
    transitions.release([0])
    transitions.evict(0)
    transitions.reshard_all()
    assert whole(transitions) == [0]
    assert transitions.live() == 0
    assert transport.log == []


def test_what_is_kept_ends_with_the_update() -> None:
    for end in (Transitions.end_of_step, Transitions.reshard_all):
        transitions, _ = make()
        transitions.take([0], Phase.FORWARD)
        transitions.keep([0])
        transitions.keep([0])
        transitions.release([0])
        transitions.take([1], Phase.FORWARD)
        assert whole(transitions) == [0, 1]
        end(transitions)
        assert transitions.holders == [0, 1, 0]


def test_a_gather_begun_ahead_is_in_flight_until_it_arrives() -> None:
    transitions, _ = make()
    transitions.begin(1)
    assert transitions.buckets[1].status is Status.GATHERING
    transitions.reshard_all()
    transitions.evict(1)  # the transport has to end it first
    assert transitions.buckets[1].status is Status.GATHERING
    transitions.take([1], Phase.FORWARD)
    assert whole(transitions) == [1]


def test_a_failed_gather_leaves_holders_that_can_be_dropped() -> None:
    transitions, transport = make()
    transport.fails = True
    with pytest.raises(ConnectionError):
        transitions.take([0, 1], Phase.FORWARD)
    transitions.release([0, 1])
    transitions.reshard_all()
    assert whole(transitions) == []
    assert transitions.holders == [0, 0, 0]


def test_illegal_transitions_are_errors_that_name_the_bucket() -> None:
    transitions, _ = make()
    with pytest.raises(TransitionError, match="bucket 2 is SHARDED: no gather is in flight"):
        transitions.arrived(2)
    transitions.begin(2)
    with pytest.raises(TransitionError, match="bucket 2 is GATHERING: only a SHARDED one can be gathered"):
        transitions.begin(2)
    transitions.arrived(2)
    with pytest.raises(TransitionError, match="bucket 2 is GATHERED: only"):
        transitions.begin(2)
    with pytest.raises(TransitionError, match="bucket 2 is GATHERED: no gather"):
        transitions.arrived(2)
    with pytest.raises(TransitionError, match="bucket 1 was released more often than taken"):
        transitions.release([1])
    with pytest.raises(TransitionError, match="bucket 0 was released more often than taken"):
        transitions.release_hold(0)
    with pytest.raises(TransitionError, match="FORWARD ended, but no pass is open"):
        transitions.end_pass(Phase.FORWARD)
    with pytest.raises(TransitionError, match="a backward ended, but none is running"):
        transitions.end_backward()


def test_new_weights_wait_for_forwards_on_other_threads() -> None:
    transitions, _ = make()
    inside, go, log = threading.Event(), threading.Event(), []

    def forward() -> None:
        with transitions.lock:
            transitions.begin_pass(Phase.OTHER_THREAD, 0)
            transitions.take([0], Phase.OTHER_THREAD)
        inside.set()
        go.wait()
        with transitions.lock:
            log.append("forward")
            transitions.release([0])
            transitions.end_pass(Phase.OTHER_THREAD)

    thread = threading.Thread(target=forward)
    thread.start()
    inside.wait()
    threading.Timer(0.05, go.set).start()
    transitions.evict_stale(0)
    log.append("evicted")
    thread.join()
    assert log == ["forward", "evicted"]
    assert whole(transitions) == []


def test_nobody_else_changes_a_state_or_asks_the_grad_mode() -> None:
    """The other files of ZeRO tell the owner; the grad mode says only what is recorded, under one name."""
    zero = Path(deepspeed.__file__).parent / "zero"
    asks_the_grad_mode = []
    for path in sorted(zero.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            if node.attr == "is_grad_enabled":
                asks_the_grad_mode.append(path.name)
            owner = ast.unparse(node.value)
            if node.attr in ("allocate", "arrived") or (node.attr == "release" and "bucket" in owner):
                assert path.name in ("transitions.py", "sharded_bucket.py") or owner == "self.transitions", (
                    path
                )
    assert asks_the_grad_mode == ["coordinator.py"]
