"""Observers that every engine may carry: progress lines, wall-clock breakdown, throughput, memory, state dump.

They subscribe to the engine's events; the engine does not know them by name.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from deepspeed.utils.logging import log_dist, logger, print_json_dist
from deepspeed.utils.memory import see_memory_usage
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

FORWARD, BACKWARD, STEP = "fwd", "bwd", "step"


def attach_observers(engine: DeepSpeedEngine) -> None:
    """Create the documented attributes (``timers``, ``tput_timer``) and subscribe what the config asks for."""
    config = engine._config
    engine.timers = SynchronizedWallClockTimer() if config.wall_clock_breakdown else NoopTimer()
    engine.tput_timer = ThroughputTimer(
        config.timers_config,
        batch_size=engine.train_batch_size(),
        steps_per_output=_print_interval(engine),
        monitor_memory=False,
    )
    if config.wall_clock_breakdown:
        WallClock(engine)
    if _print_interval(engine):
        Progress(engine)
    if config.memory_breakdown:
        engine.events.on("after_step", lambda **_: see_memory_usage("after step", force=True))
    if config.dump_state:
        print_json_dist(config._param_dict, ranks=[0])


def _print_interval(engine: DeepSpeedEngine) -> int | None:
    """Steps between progress lines, or None for none (``steps_per_print`` may be null or infinite)."""
    every = engine._config.steps_per_print
    return None if every is None or math.isinf(every) else max(1, int(every))


class Progress:
    """One line every ``steps_per_print`` optimizer steps, on rank 0, with the throughput since the last one."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.every = _print_interval(engine) or 1
        self.last_printed = 0
        engine.events.on("before_forward", self.begin)
        engine.events.on("after_step", self.report)

    def begin(self, **_: Any) -> None:
        if self.engine.module.training:
            self.engine.tput_timer.start()

    def report(self, **_: Any) -> None:
        engine = self.engine
        stepped = engine.was_step_applied() or engine.global_steps > self.last_printed
        engine.tput_timer.stop(global_step=stepped, report_speed=False)
        if not stepped or engine.global_steps % self.every or engine.global_steps == self.last_printed:
            return
        self.last_printed = engine.global_steps
        rates = [f"{lr:.3e}" for lr in engine.get_lr()]
        log_dist(
            f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={rates}, mom={engine.get_mom()}, "
            f"grad_norm={engine.get_global_grad_norm():.4g}, samples/s={engine.tput_timer.avg_samples_per_sec():.4g}",
            ranks=[0],
            level=logger.level,
        )


class WallClock:
    """``wall_clock_breakdown``: milliseconds of forward, backward and step, summed over each optimizer step."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        for before, after, name in (
            ("before_forward", "after_forward", FORWARD),
            ("before_backward", "after_backward", BACKWARD),
            ("before_step", "after_step", STEP),
        ):
            engine.events.on(before, lambda name=name, **_: engine.timers(name).start())
            engine.events.on(after, lambda name=name, **_: engine.timers(name).stop())
        self.steps = 0
        engine.events.on("after_step", self.report)

    def report(self, **_: Any) -> None:
        if self.engine.global_steps == self.steps:
            return
        self.steps = self.engine.global_steps
        self.engine.timers.log([FORWARD, BACKWARD, STEP], reset=True, ranks=[0])
