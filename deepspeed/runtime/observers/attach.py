"""Observers that any engine may have: progress, curves, wall-clock breakdown, throughput, memory, state dump.

They subscribe to the engine's events; the engine does not know them by name.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.observers.compression import attach_compression
from deepspeed.runtime.observers.curves import Curves
from deepspeed.runtime.observers.data_efficiency import attach_data_efficiency
from deepspeed.runtime.observers.experts import watch_experts
from deepspeed.runtime.observers.hang_names import NamesOfEngine
from deepspeed.runtime.observers.live_line import attach_live_line
from deepspeed.runtime.observers.out_of_memory import OutOfMemoryAdvice
from deepspeed.utils.logging import is_rank_zero, print_json_dist
from deepspeed.utils.memory import see_memory_usage
from deepspeed.utils.timer import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    FORWARD_GLOBAL_TIMER,
    STEP_GLOBAL_TIMER,
    NoopTimer,
    SynchronizedWallClockTimer,
    ThroughputTimer,
)

if TYPE_CHECKING:
    from deepspeed.runtime.engine_base import EngineBase


def attach_observers(engine: EngineBase) -> None:
    """Create the documented attributes (``timers``, ``tput_timer``, ``monitor``, ``flops_profiler``) and subscribe what
    the config asks for."""
    config = engine._config
    engine.timers = SynchronizedWallClockTimer() if config.wall_clock_breakdown else NoopTimer()
    engine.tput_timer = ThroughputTimer(
        config.timers_config,
        batch_size=engine.train_batch_size(),
        steps_per_output=_print_interval(engine),
        monitor_memory=False,
    )
    elapsed_ms: dict[str, float] = {}
    if config.wall_clock_breakdown:
        elapsed_ms = WallClock(engine).elapsed_ms
    if _print_interval(engine):
        Throughput(engine)
    if config.flops_profiler_config.enabled:
        from deepspeed.runtime.observers.flops import (
            FlopsOfOneStep,  # a profiler's imports, for those who profile
        )

        engine.flops_profiler = FlopsOfOneStep(engine).profiler
    engine.monitor = MonitorMaster(config.monitor_config)
    engine.live_page = None
    if config.live_config.enabled and engine.core is not None:
        from deepspeed.runtime.observers.live_page import LivePage  # a web server, for those who want one

        engine.live_page = LivePage(engine, config.live_config)
    if engine.monitor.enabled and is_rank_zero():
        Curves(engine, engine.monitor, elapsed_ms)
    if engine.monitor.enabled or config.wall_clock_breakdown:
        watch_experts(engine, engine.monitor if engine.monitor.enabled else None)
    if config.memory_breakdown:
        engine.events.on("after_step", lambda **_: see_memory_usage("after step", force=True))
    if config.autotuning_config.enabled and config.autotuning_config.metric_path:
        from deepspeed.runtime.observers.trial import Trial

        Trial(engine)
    if config.audit_config is not None:
        from deepspeed.runtime.observers.audit import Audit

        Audit(engine, config.audit_config)
    if config.trace_config is not None:
        from deepspeed.runtime.observers.timeline import Timeline

        Timeline(engine, config.trace_config)
    if config.dump_state:
        print_json_dist(config._param_dict, ranks=[0])
    if engine.mesh.size("tp") > 1:
        from deepspeed.runtime.observers.same_inputs import SameInputs

        SameInputs(engine)
    attach_compression(engine)
    attach_data_efficiency(engine)
    engine.quantizer = None
    if config._schema.quantize_training is not None:
        from deepspeed.runtime.observers.quantization import attach_quantization

        attach_quantization(engine)
    if engine.live_page is not None:
        engine.live_page.listen()  # after all that writes events at the end of a step
    OutOfMemoryAdvice(engine)
    engine._network.names = NamesOfEngine(engine)
    attach_live_line(engine)


def _print_interval(engine: EngineBase) -> int | None:
    """Steps between progress lines, None for no lines (``steps_per_print`` may be null or infinite)."""
    every = engine._config.steps_per_print
    return None if every is None or math.isinf(every) else max(1, int(every))


class Throughput:
    """Runs ``engine.tput_timer`` from each training forward pass to the end of the step."""

    def __init__(self, engine: EngineBase) -> None:
        self.engine = engine
        self.step = engine.global_steps
        engine.events.on("before_forward", self.begin)
        engine.events.on("after_step", self.end)

    def begin(self, **_: Any) -> None:
        if self.engine.module.training:
            self.engine.tput_timer.start()

    def end(self, **_: Any) -> None:
        stepped = self.engine.global_steps != self.step
        self.step = self.engine.global_steps
        self.engine.tput_timer.stop(global_step=stepped, report_speed=False)


class WallClock:
    """``wall_clock_breakdown``: milliseconds of forward, backward and step, summed over each optimizer step.

    ``bwd_inner`` is the part of backward that computes gradients, ``bwd_allreduce`` the time their reduction
    takes beyond that. ``elapsed_ms`` keeps the sums of the last step.
    """

    SPANS = (
        ("before_forward", "after_forward", FORWARD_GLOBAL_TIMER),
        ("before_backward", "after_backward", BACKWARD_GLOBAL_TIMER),
        ("before_backward", "before_reduction", BACKWARD_INNER_GLOBAL_TIMER),
        ("before_reduction", "after_backward", BACKWARD_REDUCE_GLOBAL_TIMER),
        ("before_step", "after_step", STEP_GLOBAL_TIMER),
    )

    def __init__(self, engine: EngineBase) -> None:
        self.engine = engine
        self.elapsed_ms: dict[str, float] = {}
        for _, after, name in reversed(
            self.SPANS
        ):  # where one span ends and the next begins, or nested spans end first
            engine.events.on(after, lambda name=name, **_: self.end(name))
        for before, _, name in self.SPANS:
            engine.events.on(before, lambda name=name, **_: self.begin(name))
        self.steps = engine.global_steps
        engine.events.on("after_step", self.report)

    def begin(self, name: str) -> None:
        timer = self.engine.timers(name)
        timer.cancel()  # a timer still running belongs to a failed pass
        timer.start()

    def end(self, name: str) -> None:
        timer = self.engine.timers(name)
        if timer.started_:
            timer.stop()

    def report(self, **_: Any) -> None:
        if self.engine.global_steps == self.steps:
            return
        self.steps = self.engine.global_steps
        names = [name for _, _, name in self.SPANS]
        self.elapsed_ms |= {name: self.engine.timers(name).elapsed(reset=False) for name in names}
        self.engine.timers.log(names, reset=True, ranks=[0])
