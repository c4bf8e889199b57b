"""Observers of any engine: progress, curves, wall-clock breakdown, throughput, memory, state dump, and names for hang
reports.

They subscribe to the engine's events; the engine does not know them by name.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.base.logging import is_rank_zero, print_json_dist
from deepspeed.base.python_gc import python_gc_manager
from deepspeed.engine.observers.progress.display import LineFormat, choose_display, made_by_client

if TYPE_CHECKING:
    from torch import Tensor

    from deepspeed.engine.interface import Engine
    from deepspeed.engine.observers.progress.curve_axis import CurveAxis
    from deepspeed.engine.observers.progress.wall_clock import WallClockBreakdown
    from deepspeed.observe.monitor.monitor import MonitorMaster
    from deepspeed.observe.timer import SynchronizedWallClockTimer, ThroughputTimer


class ObserverAttributes:
    """Attributes of an engine that observers set if configured. Rarely used ones are imported and made on first
    access."""

    live_page: Any = None
    flops_profiler: Any = None
    compression_scheduler: Any
    quantizer: Any
    random_ltd: Any = None
    random_ltd_scheduler: Any
    loss_weight: Callable[[], float] | None = None
    """Weight of the current micro-batch in its batch, if micro-batches vary; 1 if they are equal."""
    agreed_loss: Tensor | None = None
    """Loss of the batch, in an engine whose ranks agree on it before the update."""

    @cached_property
    def timers(self: Any) -> SynchronizedWallClockTimer:
        """Timers by name, for the wall-clock breakdown and for scripts."""
        from deepspeed.observe.timer import SynchronizedWallClockTimer

        return SynchronizedWallClockTimer()

    @cached_property
    def tput_timer(self: Any) -> ThroughputTimer:
        """Timer of samples per second."""
        from deepspeed.observe.timer import ThroughputTimer

        return ThroughputTimer(
            self._config.timers_config,
            batch_size=self._config.train_batch_size,
            steps_per_output=_print_interval(self),
            monitor_memory=False,
        )

    @cached_property
    def monitor(self: Any) -> MonitorMaster:
        """The monitors that the config enables."""
        from deepspeed.observe.monitor.monitor import MonitorMaster

        made = MonitorMaster(self._config.monitor_config)
        made.write_config(self._config._param_dict)
        return made

    @cached_property
    def curve_axis(self: Any) -> CurveAxis:
        """The x axis of the curves."""
        from deepspeed.engine.observers.progress.curve_axis import CurveAxis

        return CurveAxis(self, self._config.schema.monitor.x)


def attach_observers(engine: Engine) -> None:
    """Subscribe the observers that the config enables."""
    config = engine._config
    clock = _attach_clocks(engine)
    _attach_monitors(engine, clock)
    if config.memory_breakdown:
        from deepspeed.base.memory import see_memory_usage

        engine.events.on("after_step", lambda **_: see_memory_usage("after step", force=True))
    _attach_records(engine, clock)
    if config.schema.disable_python_gc:
        release = weakref.finalize(engine, python_gc_manager.release, python_gc_manager.acquire())
        engine.events.on("on_destroy", lambda **_: release())
    if config.dump_state:
        from deepspeed.config.redaction import without_secrets

        print_json_dist(without_secrets(config._param_dict), ranks=[0])
    _attach_between_ranks(engine)
    engine.compression_scheduler = None
    # A module can be prepared only if this package was imported.
    if "compression_training" in config._param_dict or "deepspeed.compression.techniques" in sys.modules:
        from deepspeed.engine.observers.compression import attach_compression

        attach_compression(engine)
    if config.curriculum_enabled_legacy or config.data_efficiency_config["enabled"]:
        from deepspeed.engine.observers.data_efficiency import attach_data_efficiency

        attach_data_efficiency(engine)
    if engine.plan.zenflow is not None:
        from deepspeed.engine.zenflow import configure_zenflow

        configure_zenflow(engine)
    engine.quantizer = None
    if config.schema.quantize_training is not None:
        from deepspeed.engine.observers.quantization import attach_quantization

        attach_quantization(engine)
    if engine.live_page is not None:
        engine.live_page.listen()  # last: after all observers that write events at the end of a step
    engine.events.on("on_error", partial(_advise, engine, set()))
    engine._network.names = HangReportNames(engine)
    display = choose_display(config.steps_per_print, config.log_level, client=made_by_client())
    if display.form is not LineFormat.NONE and is_rank_zero():
        from deepspeed.engine.observers.progress.live_line import LiveLine

        LiveLine(engine, display)


def _advise(engine: Engine, given: set[str], *, error: BaseException | None) -> None:
    """Log advice after an error, each kind once; ``given``: the kinds already given."""
    from deepspeed.engine.observers.advice import advise  # only for failing runs

    advise(engine, given, error)


def _attach_clocks(engine: Engine) -> WallClockBreakdown | None:
    """Attach time measurement: timers, throughput, the profiler. Return the clock of the breakdown, None if
    disabled."""
    config = engine._config
    clock = None
    if config.wall_clock_breakdown:
        from deepspeed.engine.observers.progress.wall_clock import WallClockBreakdown

        clock = WallClockBreakdown(engine, _print_interval(engine))
    if _print_interval(engine):
        Throughput(engine)
    if config.flops_profiler_config.enabled and config.flops_profiler_config.profile_step >= 0:
        # The profiler is imported on demand.
        from deepspeed.engine.observers.progress.flops import FlopsOfOneStep

        engine.flops_profiler = FlopsOfOneStep(engine).profiler
    return clock


def _attach_monitors(engine: Engine, clock: WallClockBreakdown | None) -> None:
    """Attach monitors and the live page, which show curves."""
    config = engine._config
    live = config.schema.monitor.live.enabled and engine.core is not None
    watched = live or config.monitor_config.enabled
    if watched or config.schema.monitor.x == "tokens":
        # Made now: writers open their files, and token counts go into checkpoints.
        _ = engine.monitor, engine.curve_axis
    reader = None
    if watched and is_rank_zero():
        from deepspeed.engine.observers.progress.readings import StepReader

        reader = StepReader(engine, engine.curve_axis)
    if live:
        from deepspeed.engine.observers.progress.live_page import LivePage  # a web server

        engine.live_page = LivePage(engine, config.schema.monitor.live, reader)
    if reader is not None:
        from deepspeed.engine.observers.progress.curves import Curves

        Curves(engine, engine.monitor, reader, clock)
    if watched or config.wall_clock_breakdown:
        from deepspeed.engine.observers.experts import watch_experts

        watch_experts(engine, _enabled_monitor(engine))


def _attach_records(engine: Engine, clock: WallClockBreakdown | None) -> None:
    """Attach observers that write files: trials, audits, timelines."""
    config = engine._config
    if config.autotuning_config.enabled and config.autotuning_config.metric_path:
        from deepspeed.engine.observers.trial import Trial

        Trial(engine, clock)
    if config.schema.audit is not None:
        from deepspeed.engine.observers.audit import Audit

        Audit(engine, config.schema.audit)
    if config.schema.trace is not None:
        from deepspeed.engine.observers.progress.timeline import Timeline

        Timeline(engine, config.schema.trace)


def _attach_between_ranks(engine: Engine) -> None:
    """Attach observers that compare ranks or count bytes sent."""
    if engine.mesh.size("tp") > 1:
        from deepspeed.engine.observers.same_inputs import SameInputsCheck

        SameInputsCheck(engine)
    speaks = bool(engine._config.wall_clock_breakdown)
    watched = _enabled_monitor(engine) is not None or speaks or engine._network.log.enabled
    if watched and any(known.size > 1 for known in engine._network.communicators()):
        from deepspeed.engine.observers.progress.links import BytesByLink

        BytesByLink(engine, speaks=speaks, monitor=_enabled_monitor(engine))


def _enabled_monitor(engine: Engine) -> MonitorMaster | None:
    """Return the monitor if it was made and is enabled, else None."""
    return engine.monitor if "monitor" in vars(engine) and engine.monitor.enabled else None


def _print_interval(engine: Engine) -> int | None:
    """Return the steps between progress lines, None for no lines (``steps_per_print`` may be null or infinite)."""
    every = engine._config.steps_per_print
    return None if every is None or math.isinf(every) else max(1, int(every))


class Throughput:
    """Runs ``engine.tput_timer`` from each training forward to the end of the step."""

    def __init__(self, engine: Engine) -> None:
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


class HangReportNames:
    """Names and position for hang reports, read by another thread while a rank hangs; holds a weak reference to the
    engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def of_module(self, module: nn.Module) -> str | None:
        """Return the module's name; that of its class for the root, None if it is not part of this engine."""
        engine = self._engine()
        if engine is None:
            return None
        if module is engine.module:
            return type(module).__name__
        return next((name for name, each in engine.module.named_modules() if each is module), None)

    def of_parameters(self, holder: Any) -> list[str]:
        """Return the parameter names of ``holder``: a bucket of weights or gradients, or any object with a layout."""
        engine = self._engine()
        if engine is None:
            return []
        params = getattr(holder, "params", None)
        if params is None and engine.core is not None:
            params = engine.core.store.params
        if params is None:
            return []
        held = [params[slot.param] for slot in holder.layout.slots if 0 <= slot.param < len(params)]
        return [name for param in held if (name := engine.param_names.get(param))]

    def position(self) -> str:
        engine = self._engine()
        if engine is None:
            return ""
        details = (f"step {engine.global_steps}", engine.position_in_batch(), engine._network.phase)
        return ", ".join(filter(None, details))
