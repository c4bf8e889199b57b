from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.base.accelerator import get_accelerator, set_accelerator
from deepspeed.base.accelerator.cpu_accelerator import CPU_Accelerator, HostEvent
from deepspeed.observe import timer as ds
from deepspeed.observe.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean


class Clock:
    """A clock that moves only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(ds.time, "perf_counter", lambda: self.now_s)

    def pass_ms(self, ms: float) -> None:
        self.now_s += ms / 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run(timer: SynchronizedWallClockTimer.Timer, clock: Clock, ms: float, **options: bool) -> None:
    timer.start()
    clock.pass_ms(ms)
    timer.stop(**options)


def test_intervals_add_up_in_milliseconds(clock: Clock) -> None:
    timers = SynchronizedWallClockTimer()
    assert not timers.has_timer("a")
    run(timers("a"), clock, 10)
    run(timers("a"), clock, 5)
    assert timers.has_timer("a") and list(timers.get_timers()) == ["a"]
    assert timers("a").elapsed(reset=False) == pytest.approx(15)
    assert timers("a").elapsed() == pytest.approx(15)
    assert timers("a").elapsed() == 0


def test_stop_with_reset_replaces_the_sum(clock: Clock) -> None:
    timer = SynchronizedWallClockTimer.Timer("a")
    run(timer, clock, 10)
    run(timer, clock, 3, reset=True)
    assert timer.elapsed() == pytest.approx(3)


def test_a_running_timer_can_be_read(clock: Clock) -> None:
    timer = SynchronizedWallClockTimer.Timer("a")
    timer.start()
    clock.pass_ms(10)
    assert timer.elapsed(reset=False) == pytest.approx(10) and timer.started_
    clock.pass_ms(7)
    timer.stop()
    assert timer.elapsed() == pytest.approx(17)


def test_mean_of_recorded_intervals(clock: Clock) -> None:
    timers = SynchronizedWallClockTimer()
    run(timers("a"), clock, 1000)
    assert timers("a").mean() == pytest.approx(1000)
    timers("a").reset()
    for ms in (10, 20):
        run(timers("a"), clock, ms, record=True)
    run(timers("a"), clock, 500)  # not recorded
    assert timers.get_mean(["a", "unknown"], normalizer=5, reset=False) == pytest.approx({"a": 3})
    assert timers.get_mean(["a"]) == pytest.approx({"a": 15})
    assert timers.get_mean(["a"]) == {"a": 0}


def test_a_timer_that_nobody_reads_stays_small(clock: Clock) -> None:
    timer = SynchronizedWallClockTimer.Timer("a")
    for _ in range(1000):
        run(timer, clock, 1)
    assert len(timer._finished) < ds.MAX_UNREAD_SPANS
    assert timer.elapsed() == pytest.approx(1000)


def test_misuse_is_refused(clock: Clock) -> None:
    timer = SynchronizedWallClockTimer.Timer("a")
    with pytest.raises(RuntimeError, match="'a' is not started"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="'a' has already been started"):
        timer.start()
    with pytest.raises(ValueError, match="normalizer=0"):
        SynchronizedWallClockTimer().log([], normalizer=0)


def test_log(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    timers = SynchronizedWallClockTimer()
    run(timers("fwd"), clock, 10)
    timers.log(["fwd", "unknown"], normalizer=4, memory_breakdown=True, ranks=[0])
    timers.log(["fwd"], ranks=[1])
    out = capsys.readouterr().out
    assert out.startswith("[Rank 0] time (ms) | fwd: 2.50 | mem_allocated: ") and out.count("\n") == 1
    assert timers("fwd").elapsed() == 0


def test_real_time() -> None:
    timer = SynchronizedWallClockTimer.Timer("a")
    before = time.perf_counter()
    timer.start()
    time.sleep(0.02)
    timer.stop()
    assert 20 <= timer.elapsed() <= 1000 * (time.perf_counter() - before)


class Asynchronous(CPU_Accelerator):
    """An accelerator whose time has to be taken with events."""

    def is_synchronized_device(self) -> bool:
        return False


def test_devices_are_timed_with_events_and_wait_only_when_asked(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(HostEvent, "synchronize", lambda event: waits.append(event))
    before = get_accelerator()
    set_accelerator(Asynchronous())
    try:
        timer = SynchronizedWallClockTimer.Timer("a")
        run(timer, clock, 10, record=True)
        run(timer, clock, 5, record=True)
        assert not waits
        assert timer.mean() == pytest.approx(7.5) and timer.elapsed() == pytest.approx(15)
        assert len(waits) == 2
    finally:
        set_accelerator(before)


def test_noop() -> None:
    timers = NoopTimer()
    timers("a").start()
    timers("a").stop(record=True)
    timers("a").reset()
    assert timers("a").elapsed(reset=True) == timers("a").mean() == 0
    assert timers.get_timers() == timers.get_mean(["a"]) == {} and not timers.has_timer("a")
    timers.log(["a"])


def throughput(**options: Any) -> tuple[ThroughputTimer, list[str]]:
    lines: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    return ThroughputTimer(config, 4, logging_fn=lines.append, **options), lines


def step(timer: ThroughputTimer, clock: Clock, micro_ms: list[float], **options: bool) -> None:
    for index, ms in enumerate(micro_ms):
        timer.start()
        clock.pass_ms(ms)
        timer.stop(global_step=index == len(micro_ms) - 1, **options)


def test_throughput_counts_whole_steps_after_the_warm_up(clock: Clock) -> None:
    timer, lines = throughput(start_step=2, steps_per_output=2)
    step(timer, clock, [500, 500])
    assert timer.avg_samples_per_sec() == float("-inf")
    step(timer, clock, [500])
    step(timer, clock, [10, 30])
    step(timer, clock, [10, 50])
    assert timer.avg_samples_per_sec() == pytest.approx(2 * 4 / 0.1)
    assert len(lines) == 1 and "epoch=0/micro_step=7/global_step=4" in lines[0]
    shown = dict(part.split("=", 1) for part in lines[0].split(", "))
    assert float(shown["CurrSamplesPerSec"]) == pytest.approx(4 / 0.06)
    assert float(shown["RunningAvgSamplesPerSec"]) == pytest.approx(80)
    timer.update_epoch_count()
    assert timer.epoch_count == 1 and timer.micro_step_count == 0
    step(timer, clock, [10])
    step(timer, clock, [10], report_speed=False)
    assert len(lines) == 1


def test_throughput_says_where_it_stands(clock: Clock) -> None:
    timer, _ = throughput(start_step=1)
    timer.stop()  # never started
    assert (timer.initialized, timer.micro_step_count) == (False, 0)
    timer.start()
    assert (timer.initialized, timer.started, timer.start_time) == (True, True, 0.0)
    timer.stop(global_step=True)
    assert timer.total_elapsed_time == timer.end_time == 0.0
    step(timer, clock, [20])
    assert timer.end_time - timer.start_time == pytest.approx(0.02) == timer.total_elapsed_time


def test_throughput_with_memory_and_switched_off(clock: Clock) -> None:
    timer, lines = throughput(start_step=0, steps_per_output=1, monitor_memory=True)
    step(timer, clock, [10])
    assert "MemAvailable=" in lines[0]
    timer.config.enabled = False
    step(timer, clock, [10])
    assert timer.global_step_count == 1


def test_trim_mean() -> None:
    assert trim_mean([], 0.1) == 0 and trim_mean([1, 2, 3, 4, 100], 0.1) == 22
    assert trim_mean([*range(9), 1000], 0.1) == pytest.approx(4.5)
    with pytest.raises(ValueError, match="trim_percent=0.5"):
        trim_mean([1], 0.5)


@pytest.mark.parametrize(
    "interval, words", [(0, "greater than 0"), (-1, "positive"), (1.5, "positive integer")]
)
def test_intervals_that_no_step_can_reach_are_refused(interval: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"steps_per_output must be .*{words}"):
        throughput(steps_per_output=interval)
    timer, _ = throughput(steps_per_output=3)
    timer.global_step_count = 6
    assert timer._is_report_boundary() and not throughput()[0]._is_report_boundary()
