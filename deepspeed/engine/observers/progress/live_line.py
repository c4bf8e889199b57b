"""Progress on one line: by default a status line on a terminal, else periodic log lines.

Between lines a step only reads the clock; loss and inputs are read only in the step before a line is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from deepspeed.base.logging import logger, report
from deepspeed.base.memory import GIB
from deepspeed.base.terminal import StatusLine, another_display_is_active
from deepspeed.engine.observers.progress.display import Display, LineFormat
from deepspeed.engine.observers.progress.readings import LossMeter, memory_of, tokens_per_sample, total_steps

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

FIRST_LINE_S, MAX_PAUSE_S = 2.0, 60.0
"""Pauses between log lines double from the first to the second value."""

BAR_PAUSE_S = 0.5
BAR_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """The progress at one moment; None: unknown."""

    step: int
    skipped: int
    rates: list[float]
    momenta: list[Any]
    loss: float | None
    norm: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    step_s: float | None
    memory_bytes: int
    total_steps: int | None

    @property
    def left(self) -> str | None:
        if self.total_steps is None or self.step_s is None:
            return None
        return str(timedelta(seconds=round(max(0, self.total_steps - self.step) * self.step_s)))


def as_line(progress: StepProgress) -> str:
    """Format for a log: starts with the four documented fields, in the format that scripts parse."""
    parts = [
        f"step={progress.step}",
        f"skipped={progress.skipped}",
        f"lr={progress.rates}",
        f"mom={progress.momenta}",
    ]
    optional = (
        ("loss={:.5g}", progress.loss),
        ("grad_norm={:.4g}", progress.norm),
        ("samples/s={:.4g}", progress.samples_per_s),
        ("tokens/s={:.4g}", progress.tokens_per_s),
        ("step_ms={:.4g}", None if progress.step_s is None else 1e3 * progress.step_s),
        ("memory={:.2f} GB", progress.memory_bytes / GIB),
        ("left={}", progress.left),
    )
    return ", ".join(parts + [text.format(value) for text, value in optional if value is not None])


def as_bar(progress: StepProgress) -> str:
    """Format for a terminal: most important first, as it may be truncated on the right."""
    parts = [f"step {progress.step}"]
    if progress.total_steps:
        share = min(1.0, progress.step / progress.total_steps)
        filled = int(share * BAR_WIDTH)
        parts = [f"{share:4.0%} |{'#' * filled:<{BAR_WIDTH}}| step {progress.step}/{progress.total_steps}"]
    optional = (
        ("loss {:.4g}", progress.loss),
        ("{} left", progress.left),
        ("lr {:.3g}", progress.rates[0] if progress.rates else None),
        ("norm {:.3g}", progress.norm),
        ("{:.4g} tokens/s", progress.tokens_per_s),
        ("{:.4g} samples/s", progress.samples_per_s if progress.tokens_per_s is None else None),
        ("{:.4g} ms/step", None if progress.step_s is None else 1e3 * progress.step_s),
        ("{:.2f} GB", progress.memory_bytes / GIB),
        ("{} skipped", progress.skipped or None),
    )
    return "  ".join(parts + [text.format(value) for text, value in optional if value is not None])


class LiveLine:
    """Subscribes to an engine's events and shows its progress.

    Args:
        now_s: the clock.
    """

    def __init__(self, engine: Engine, display: Display, now_s: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.every = display.every
        self.status = StatusLine() if display.form is LineFormat.BAR else None
        self.now_s = now_s
        self.meter = LossMeter(engine)
        self.tokens_per_sample: int | None = None
        self.looking = False
        self.listen()  # a first step may take minutes
        self.pause_s = BAR_PAUSE_S if self.status is not None else FIRST_LINE_S
        self.last_s = now_s()
        self.due_s = self.last_s + (0.0 if self.status is not None else self.pause_s)
        self.step = engine.global_steps
        self.mark: tuple[float, int, int] | None = None  # time, steps, samples of the last line
        engine.events.on("after_update", self.after_update)
        engine.events.on("on_load", self.resume)
        engine.events.on("on_destroy", self.close)

    def after_update(self, **_: Any) -> None:
        step = self.engine.global_steps
        now, before = self.now_s(), self.last_s
        self.step, self.last_s = step, now
        if self.mark is None:
            self.mark = (now, step, self.engine.global_samples)
        if now >= self.due_s if self.every is None else step % self.every == 0:
            self.show(now)
        if self.looking:
            self.look_away()
        if now + (now - before) >= self.due_s if self.every is None else (step + 1) % self.every == 0:
            self.listen()

    def listen(self) -> None:
        """Read loss and inputs in the next step, after which a line is shown."""
        self.meter.listen()
        if not self.looking:
            self.looking = True
            self.engine.events.on("before_forward", self.look_at_inputs)

    def look_away(self) -> None:
        self.looking = False
        self.meter.forget()
        self.engine.events.off("before_forward", self.look_at_inputs)

    def show(self, now: float) -> None:
        """Show a line; errors must not affect training."""
        try:
            progress = self.progress(now)
            if self.status is None:
                report(as_line(progress))
            elif not another_display_is_active():
                self.status.show(as_bar(progress))
        except Exception as error:
            logger.debug(f"cannot write the progress line: {error}")
        self.mark = (now, self.step, self.engine.global_samples)
        if self.status is None:
            self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
        self.due_s = now + self.pause_s

    def progress(self, now: float) -> StepProgress:
        engine = self.engine
        mark_s, mark_steps, mark_samples = self.mark or (now, self.step, engine.global_samples)
        steps, seconds = self.step - mark_steps, now - mark_s
        known = steps > 0 and seconds > 0
        samples_per_s = (engine.global_samples - mark_samples) / seconds if known else None
        tokens = self.tokens_per_sample
        return StepProgress(
            step=self.step,
            skipped=engine.skipped_steps,
            rates=engine.get_lr(),
            momenta=engine.get_mom(),
            loss=self.meter.take(),
            norm=engine.get_global_grad_norm(),
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * tokens if samples_per_s is not None and tokens is not None else None,
            step_s=seconds / steps if known else None,
            memory_bytes=memory_of(engine.device),
            total_steps=total_steps(engine.lr_scheduler),
        )

    def look_at_inputs(self, *, inputs: Any = (), kwargs: Any = {}, **_: Any) -> None:  # noqa: B006 - read only
        self.tokens_per_sample = tokens_per_sample([kwargs.get("input_ids"), *inputs])

    def resume(self, **_: Any) -> None:
        """Restart the speed measurement after a load, when steps and samples jump."""
        self.step, self.mark = self.engine.global_steps, None
        if self.every is not None and (self.step + 1) % self.every == 0:
            self.listen()

    def close(self, **_: Any) -> None:
        if self.status is not None:
            self.status.close()
