"""Timers. All times are in milliseconds unless the name says otherwise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger, print_dist
from deepspeed.base.memory import GIB, memory_usage

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
EXPOSED_COMMUNICATION_TIMER = "exposed_comm"
DATA_TIMER = "data"
STEP_WAITS = "step_waits"  # not a timer: the part of the exposed communication within the update

MAX_UNREAD_SPANS = 256  # per timer
OUTLIER_SHARE = 0.1  # share of the intervals dropped at each end before averaging


class CudaEventTimer:
    """Time between two recorded events of the accelerator."""

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event = start_event
        self.end_event = end_event

    def get_elapsed_msec(self) -> float:
        """Return the elapsed time in ms, after waiting for the end event."""
        self.end_event.synchronize()
        return self.start_event.elapsed_time(self.end_event)


class _HostSpan:
    """Host time between two moments, with the device synchronized at both."""

    def __init__(self) -> None:
        get_accelerator().synchronize()
        self._start_s = time.perf_counter()
        self._elapsed_ms = 0.0

    def end(self) -> None:
        get_accelerator().synchronize()
        self._elapsed_ms = (time.perf_counter() - self._start_s) * 1000.0

    def elapsed_ms(self) -> float:
        return self._elapsed_ms


class _DeviceSpan:
    """Time between two events on the current stream; reading it synchronizes, recording does not."""

    def __init__(self) -> None:
        event = get_accelerator().Event
        self._events = CudaEventTimer(event(enable_timing=True), event(enable_timing=True))
        self._events.start_event.record()

    def end(self) -> None:
        self._events.end_event.record()

    def elapsed_ms(self) -> float:
        return self._events.get_elapsed_msec()


class SynchronizedWallClockTimer:
    """A set of named timers: ``timers("fwd").start()``, ``.stop()``, ``timers.log(["fwd"])``."""

    class Timer:
        """Accumulates the intervals between ``start`` and ``stop``."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self._span: _HostSpan | _DeviceSpan | None = None
            self._finished: list[tuple[_HostSpan | _DeviceSpan, bool]] = []  # (span, record it)
            self._total_ms = 0.0
            self._recorded_ms: list[float] = []

        def start(self) -> None:
            if self.started_:
                raise RuntimeError(f"Timer {self.name_!r} has already been started.")
            self._span = _HostSpan() if get_accelerator().use_host_timers() else _DeviceSpan()
            self.started_ = True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """End the interval.

            Args:
                reset: The interval replaces the sum so far instead of adding to it.
                record: Keep the interval for ``mean``.
            """
            if self._span is None:
                raise RuntimeError(f"Timer {self.name_!r} is not started.")
            self._span.end()
            if reset:
                self._settle()
                self._total_ms = 0.0
            self._finished.append((self._span, record))
            self._span, self.started_ = None, False
            # Read the older half, which the device completed long ago, so that unread spans stay bounded.
            if len(self._finished) == MAX_UNREAD_SPANS:
                self._settle(MAX_UNREAD_SPANS // 2)

        def add(self, milliseconds: float) -> None:
            """Add a time that was measured by other means."""
            self._total_ms += milliseconds

        def cancel(self) -> None:
            """Drop a running interval, after a failure of the timed code."""
            self._span, self.started_ = None, False

        def reset(self) -> None:
            """Discard everything, including a running interval."""
            self.cancel()
            self._finished.clear()
            self._recorded_ms.clear()
            self._total_ms = 0.0

        def elapsed(self, reset: bool = True) -> float:
            """Return the sum of the intervals in ms; a running one counts up to now and continues."""
            running = self.started_
            if running:
                self.stop()
            self._settle()
            total = self._total_ms
            if reset:
                self.reset()
            if running:
                self.start()
            return total

        def mean(self) -> float:
            """Return the mean of the recorded intervals in ms without outliers; the sum if none was recorded."""
            self._settle()
            return trim_mean(self._recorded_ms, OUTLIER_SHARE) if self._recorded_ms else self._total_ms

        def _settle(self, count: int | None = None) -> None:
            """Add the first ``count`` finished intervals (None: all) to the sums."""
            for span, record in self._finished[:count]:
                interval = span.elapsed_ms()
                self._total_ms += interval
                if record:
                    self._recorded_ms.append(interval)
            del self._finished[:count]

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        if name not in self.timers:
            self.timers[name] = self.Timer(name)
        return self.timers[name]

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        return self.timers

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the sums in ms divided by ``normalizer``, on rank 0 unless ``ranks`` says otherwise."""
        _check_normalizer(normalizer)
        text = "time (ms)"
        for name in names:
            if name in self.timers:
                text += f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
        if memory_breakdown:
            text += memory_usage()
        print_dist(text, ranks=[0] if ranks is None else ranks)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the ``mean`` of each known name in ms, divided by ``normalizer``."""
        _check_normalizer(normalizer)
        means = {}
        for name in names:
            if name in self.timers:
                means[name] = self.timers[name].mean() / normalizer
                if reset:
                    self.timers[name].reset()
        return means


def _check_normalizer(normalizer: float) -> None:
    if normalizer <= 0.0:
        raise ValueError(f"normalizer={normalizer}: must be positive.")


class NoopTimer:
    """The interface of `SynchronizedWallClockTimer`, doing nothing."""

    class Timer:
        def start(self) -> None: ...

        def stop(self, **kwargs: Any) -> None: ...

        def reset(self) -> None: ...

        def elapsed(self, **kwargs: Any) -> float:
            return 0

        def mean(self) -> float:
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, NoopTimer.Timer]:
        return {}

    def has_timer(self, name: str) -> bool:
        return False

    def log(self, *args: Any, **kwargs: Any) -> None: ...

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        return {}


def _checked_interval(steps_per_output: float | None) -> int | None:
    words = "steps_per_output must be a positive integer or None"
    if steps_per_output is None or steps_per_output == math.inf:
        return None
    if int(steps_per_output) != steps_per_output:
        raise ValueError(f"{words}, not {steps_per_output}")
    if steps_per_output <= 0:
        raise ValueError(f"steps_per_output must be greater than 0, not {steps_per_output}: {words}")
    return int(steps_per_output)


class ThroughputTimer:
    """Samples per second over whole optimizer steps.

    Args:
        config: Has ``enabled`` and ``synchronized`` (synchronize the device at both ends), as the section
            ``timers.throughput`` of the config.
        batch_size: Samples per optimizer step over all ranks.
        start_step: Number of first optimizer steps that are not counted, as warm-up.
        steps_per_output: Optimizer steps between reports; None never reports.
        logging_fn: Receives the report's text; logs at level INFO by default.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = max(1, batch_size or 1)
        self.start_step = start_step
        self.steps_per_output = _checked_interval(steps_per_output)
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0  # seconds
        self.step_elapsed_time = 0.0  # seconds of the running optimizer step
        self.started = False
        self.initialized = False
        """Whether the timer was ever started."""
        self.start_time = self.end_time = 0.0  # seconds, of the last counted micro-batch
        self._start_s: float | None = None

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-batch."""
        if not self.config.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._start_s = self._now_s()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch; ``global_step``: it also ends an optimizer step."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if global_step:
            self.global_step_count += 1
        if self._start_s is None:
            return
        self.end_time = self._now_s()
        duration = self.end_time - self._start_s
        self._start_s = None
        self.total_elapsed_time += duration
        self.step_elapsed_time += duration
        if global_step:
            if report_speed and self._is_report_boundary():
                self.logging(self._report())
            self.step_elapsed_time = 0.0

    def _is_report_boundary(self) -> bool:
        interval = _checked_interval(self.steps_per_output)
        return interval is not None and self.global_step_count % interval == 0

    def avg_samples_per_sec(self) -> float:
        """Return the mean samples per second over the counted steps; minus infinity before the first."""
        steps = self.global_step_count - self.start_step
        if steps <= 0 or self.total_elapsed_time <= 0:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time

    def _now_s(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def _report(self) -> str:
        accelerator = get_accelerator()
        current = self.batch_size / self.step_elapsed_time if self.step_elapsed_time > 0 else float("inf")
        text = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/"
            f"global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={current}, "
            f"MemAllocated={accelerator.memory_allocated() / GIB:.2f}GB, "
            f"MaxMemAllocated={accelerator.max_memory_allocated() / GIB:.2f}GB"
        )
        if self.monitor_memory:
            free, total = accelerator.available_memory(), accelerator.total_memory()
            text += f", MemAvailable={free / GIB:.2f}GB of {total / GIB:.2f}GB"
        return text


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without the share ``trim_percent`` (0 to below 0.5) of the smallest and of the largest values; 0
    without values.
    """
    if not 0.0 <= trim_percent < 0.5:
        raise ValueError(
            f"trim_percent={trim_percent}: must be in [0, 0.5), the fraction to trim from each end."
        )
    drop = int(len(data) * trim_percent)
    kept = sorted(data)[drop : len(data) - drop]
    return sum(kept) / len(kept) if kept else 0
