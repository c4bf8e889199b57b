"""`monitor.live` with an engine: what the record says is what was trained, and what it costs, counted."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import types
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import deepspeed
from deepspeed.base.events import Events
from deepspeed.base.logging import logger
from deepspeed.engine.observers.progress import live_page as step_parts
from deepspeed.engine.observers.progress.display import VARIABLE
from deepspeed.engine.observers.progress.live_page import RankProgress
from deepspeed.observe.live import jobs, recorder
from deepspeed.observe.live.ranks import RankStates
from deepspeed.observe.live.record import FIRST, LAST, LOSS, LR, NAME, NORM, TOKENS, StepWindow
from deepspeed.parallel.pipeline.module import PipelineModule
from deepspeed.tools.live import Follower
from tests.engine.test_step_cost import calls_of, engine_step, operations_of
from tests.pool import distributed
from tests.zero.models import batch, config_for, make_zoo

QUIET = {"steps_per_print": float("inf")}


def start(folder: Path, stage: int = 1, **more: Any) -> Any:
    live = {"folder": str(folder), "port": 0, **more.pop("live", {})}
    config = {**config_for(stage), **QUIET, "monitor": {"live": live}, **more}
    return deepspeed.initialize(model=make_zoo(), config=config)[0]


def train(engine: Any, until: int) -> list[tuple[float, float, float]]:
    """(loss, norm, rate) of each step."""
    seen = []
    while engine.global_steps < until:
        step, losses = engine.global_steps, []
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(batch(step, micro, engine.global_rank))
            engine.backward(loss)
            rate = engine.get_lr()[0]
            engine.step()
            losses.append(loss.item())
        seen.append((sum(losses) / len(losses), engine.get_global_grad_norm(), rate))
    return seen


def as_steps(engine: Any) -> None:
    """Every step gets a row of its own."""
    page = engine.live_page
    if page.recorder is not None:
        page.recorder._window.__class__ = _Narrow


class _Narrow(StepWindow):
    @property
    def width_s(self) -> float:
        return 0.0


def followed(folder: Path) -> Any:
    follower = Follower(folder / NAME)
    follower.look()
    return follower.history


@distributed(world_size=[1, 2])
def test_the_record_says_what_was_trained(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    engine = start(tmp_path / "live", 2)
    as_steps(engine)
    seen = train(engine, 5)
    engine.save_checkpoint(str(tmp_path / "out"))
    engine.destroy()
    assert not [each for each in threading.enumerate() if "deepspeed live" in each.name]
    if engine.global_rank != 0:
        return
    history = followed(tmp_path / "live")
    rows = history.answer(-1, -1)["rows"]
    assert [(row[FIRST], row[LAST]) for row in rows] == [(n, n) for n in range(1, 6)]
    for row, (loss, norm, rate) in zip(rows, seen, strict=True):
        assert row[LOSS] == pytest.approx(loss, rel=1e-4)
        assert row[NORM] == pytest.approx(norm, rel=1e-4)
        assert row[LR] == pytest.approx(rate, rel=1e-4)
    samples = engine.train_batch_size()
    assert [row[TOKENS] for row in rows[1:]] == [7 * samples] * 4
    events = [(each["event"], each["step"]) for each in history.answer(-1, -1)["events"]]
    assert events == [("start", 0), ("saved", 5), ("end", 5)]
    assert history.state["saved"] == {"step": 5, "text": f"{tmp_path / 'out'}/global_step5"}
    run = history.state["run"]
    assert (run["ranks"], run["stage"], run["device"]) == (engine.world_size, 2, "cpu")
    assert not list((tmp_path / "jobs").glob("*.json"))


@distributed(world_size=1)
def test_a_resume_continues_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    live = tmp_path / "live"
    engine = start(live)
    as_steps(engine)
    train(engine, 3)
    engine.save_checkpoint(str(tmp_path / "out"))
    first = train(engine, 6)
    engine.destroy()
    engine = start(live)
    as_steps(engine)
    engine.load_checkpoint(str(tmp_path / "out"))
    second = train(engine, 8)
    engine.destroy()
    answer = followed(live).answer(-1, -1)
    assert [row[LAST] for row in answer["rows"]] == list(range(1, 9))
    assert [row[LOSS] for row in answer["rows"]][3:] == [pytest.approx(loss, rel=1e-4) for loss, *_ in second]
    assert [loss for loss, *_ in second[:3]] == [loss for loss, *_ in first]
    assert ("resume", 3) in [(each["event"], each["step"]) for each in answer["events"]]


@distributed(world_size=1)
def test_the_page_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    monkeypatch.delenv(VARIABLE, raising=False)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda made: lines.append(made.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        engine = start(tmp_path / "live")
    finally:
        logger.removeHandler(handler)
    page = engine.live_page
    assert any(page.server.address in line and str(tmp_path / "live") in line for line in lines)
    as_steps(engine)
    train(engine, 4)
    engine.monitor.write_events([("Eval/accuracy", 0.5, engine.global_samples)])
    page.recorder._end.set()  # the thread takes what there is, and leaves
    page.recorder._thread.join()
    with urllib.request.urlopen(page.server.address + "/data?epoch=-1&since=-1", timeout=10) as answer:
        told = json.load(answer)
    assert [row[LAST] for row in told["rows"]] == [1, 2, 3, 4]
    assert told["rows"][-1][-5] > 0  # forward, in ms
    state = told["state"]
    assert state["step"] == 4 and state["memory"] > 0
    assert state["plan"]["line"] > state["plan"]["most"] >= state["plan"]["now"] > 0
    assert [each["rank"] for each in state["ranks"]] == [0] and state["ranks"][0]["step"] == 4
    assert state["ranks"][0]["arrival_ms"] > 0
    assert told["curves"][-1]["curves"] == {"Eval/accuracy": 0.5}
    engine.destroy()


@distributed(world_size=1)
def test_jobs_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    monkeypatch.setattr(recorder, "PAUSE_S", 1000.0)
    engine = start(tmp_path / "live")
    train(engine, 2)
    engine.live_page.recorder.look()
    found = jobs.running_jobs()
    assert [(job["pid"], job["step"]) for job in found] == [(os.getpid(), 2)]
    assert found[0]["address"] == engine.live_page.server.address
    assert found[0]["folder"] == str(tmp_path / "live")
    engine.destroy()
    assert jobs.running_jobs() == []


@distributed(world_size=1)
def test_what_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, bit for bit, without it, with it, and where neither record nor page are possible."""
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    (tmp_path / "file").write_text("")
    weights = []
    for live in (
        False,
        {"folder": str(tmp_path / "live"), "port": 0},
        {"folder": str(tmp_path / "file" / "x"), "host": "203.0.113.1"},
    ):
        told: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda made, told=told: told.append(made.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        engine = deepspeed.initialize(
            model=make_zoo(), config={**config_for(2), **QUIET, "monitor": {"live": live}}
        )[0]
        train(engine, 3)
        weights.append([param.detach().clone() for param in engine.module.parameters()])
        engine.destroy()
        logger.removeHandler(handler)
    told = [text for text in told if "live" in text]
    assert len(told) == 2 and "cannot serve the live page" in told[0] and "cannot write the record" in told[1]
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


@distributed(world_size=2)
def test_ranks_tell_each_other_through_the_store() -> None:
    rank, now = dist.get_rank(), [100.0]
    states = RankStates(lambda: {"step": 7, "arrival_ms": 10.0 + 30 * rank, "memory": 5}, lambda: now[0])
    if rank == 1:
        states.exchange()
    dist.barrier()
    if rank == 0:
        states.exchange()
        table = states.table()
        assert [(each["rank"], each["step"], each["seen"]) for each in table["ranks"]] == [
            (0, 7, 100.0),
            (1, 7, 100.0),
        ]
        assert table["slowest"] == 1
        now[0] = 130.0
        states.exchange()  # rank 1 has said nothing new
        assert [each["seen"] for each in states.table()["ranks"]] == [130.0, 100.0]
    dist.barrier()


@distributed(world_size=1)
def test_a_rank_that_comes_later_to_the_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step = engine_step(1)
    seconds = iter([0.0, 0.3, 0.5, 0.8, 1.0])
    clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr("deepspeed.engine.observers.progress.live_page.time", clock)
    pulse = RankProgress(engine)
    pulse.reach_reduction()
    assert pulse.end_step(1) == 0.5
    assert pulse.arrival_s() == 0.3
    pulse.reach_reduction()
    assert pulse.end_step(2) == 0.5
    assert pulse.arrival_s() == pytest.approx(0.3)
    engine.destroy()


class Accelerator:
    """Whose events are passed when the device has come to them: ``passed`` of them."""

    def __init__(self, on_host: bool) -> None:
        self.on_host, self.made, self.passed = on_host, 0, 0

    def use_host_timers(self) -> bool:
        return self.on_host

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        accelerator = self

        class Event:
            def record(self) -> None:
                self.number = accelerator.made
                accelerator.made += 1

            def query(self) -> bool:
                return self.number < accelerator.passed

            def elapsed_time(self, end: Any) -> float:
                assert self.query() and end.query()
                return 1000.0 * (end.number - self.number)

        return Event()


EVENTS_OF_A_STEP = (
    "before_forward", "after_forward", "before_backward", "before_reduction", "after_backward", "before_step",
    "after_step",
)  # fmt: skip


@pytest.mark.parametrize("on_host", [True, False])
def test_the_parts_of_a_step(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event is a second after the one before; on a device they are read when it has passed them."""
    events, accelerator = Events(), Accelerator(on_host)
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(step_parts, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(step_parts, "time", clock)
    parts = step_parts.StepParts(types.SimpleNamespace(events=events))  # type: ignore[arg-type]

    def step(micro_batches: int) -> tuple[float, ...]:
        accelerator.passed = accelerator.made
        with torch.no_grad():
            for event in ("before_forward", "after_forward"):  # an evaluation
                events.emit(event)
        for _ in range(micro_batches):
            for event in EVENTS_OF_A_STEP:
                events.emit(event)
        return parts.take()

    def expected(micro_batches: int) -> tuple[float, ...]:
        return tuple(1000.0 * micro_batches * seconds for seconds in (1, 2, 1, 1, 1))

    taken = [step(micro_batches) for micro_batches in (1, 2, 3)]
    assert taken == [expected(n) for n in ((1, 2, 3) if on_host else (0, 1, 2))]
    if not on_host:
        accelerator.passed = 0
        assert parts.take() == expected(0), "nothing waits for the device"


def stage_data() -> Any:
    while True:
        yield torch.ones(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)


@distributed(world_size=2)
def test_a_pipeline_has_its_loss_on_the_rank_that_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    module = PipelineModule(
        [torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)],
        num_stages=2,
        loss_fn=lambda out, labels: functional.cross_entropy(out.flatten(0, 1), labels.flatten()),
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "monitor": {"live": {"folder": str(tmp_path / "live"), "port": 0}},
        **QUIET,
    }
    engine = deepspeed.initialize(model=module, config=config)[0]
    as_steps(engine)
    data = stage_data()
    losses = [engine.train_batch(data).item() for _ in range(4)]
    engine.destroy()
    if engine.global_rank == 0:
        rows = followed(tmp_path / "live").answer(-1, -1)["rows"]
        assert [row[LOSS] for row in rows] == [pytest.approx(loss, rel=1e-4) for loss in losses]
        assert [row[TOKENS] for row in rows[1:]] == [2 * 3 * 7] * 3


@distributed(world_size=1)
def test_a_step_costs_a_fixed_number_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the model, and nothing that waits for the device but what every monitor reads: the loss."""
    monkeypatch.setenv("DEEPSPEED_PROGRESS", "0")
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    monkeypatch.setattr(recorder, "PAUSE_S", 1000.0)
    engine, step = engine_step(1)
    calls, operations = calls_of(step), operations_of(step)
    engine.destroy()
    engine, step = engine_step(1, csv_monitor={"enabled": True, "output_path": str(tmp_path)})
    of_monitor = operations_of(step) - operations
    engine.destroy()
    engine, step = engine_step(1, monitor={"live": {"folder": str(tmp_path / "live"), "port": 0}})
    queued = len(engine.live_page.recorder._queue)
    assert operations_of(step) - operations == of_monitor
    assert calls_of(step) - calls <= 50  # 42, of which seven mark the parts
    assert len(engine.live_page.recorder._queue) - queued == 2  # one entry per step
    engine.destroy()


def asked_of_the_system(step: Any) -> list[str]:
    """The functions of C that may enter the kernel or wait for another thread, in the order of their calls."""
    doors, found = {"posix", "_io", "_socket", "select", "_thread", "_posixsubprocess", "mmap"}, []

    def watch(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            owner = getattr(function, "__self__", None)
            modules = {
                getattr(function, "__module__", None),
                getattr(owner, "__name__", None),
                type(owner).__module__,
            }
            if modules & doors:
                found.append(f"{type(owner).__name__}.{function.__name__}")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found


@distributed(world_size=1)
def test_a_step_asks_nothing_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page adds to a step neither enters the kernel nor waits for a lock: its threads do."""
    monkeypatch.setenv("DEEPSPEED_PROGRESS", "0")
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    monkeypatch.setattr(recorder, "PAUSE_S", 1000.0)
    engine, step = engine_step(1)
    alone = asked_of_the_system(step)
    engine.destroy()
    engine, step = engine_step(1, monitor={"live": {"folder": str(tmp_path / "live"), "port": 0}})
    assert asked_of_the_system(step) == alone
    assert asked_of_the_system(engine.live_page.recorder.look) != []  # they are seen where they are
    engine.destroy()


@distributed(world_size=1)
def test_the_entry_of_a_job_is_written_as_often_as_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jobs.VARIABLE, str(tmp_path / "jobs"))
    entry, seconds = jobs.JobEntry({}), itertools.count()
    written: list[int] = []
    made = recorder.LiveRecorder(tmp_path / "live", {}, entry=entry, now=lambda: float(next(seconds)))
    monkeypatch.setattr(entry, "write", lambda state: written.append(state["now"]))
    for _ in range(10):
        made.look()
    assert written == [0, 2, 4, 6, 8]
    made.look(last=True)
