"""Warnings, given once, about steps that bypass the engine or have nothing to apply."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from deepspeed.base.logging import log_dist
from deepspeed.zero.accumulation import AccumulationClock

_WATCH = "_ds_step_watch"  # attribute of an optimizer: the hook of the engine that was made of it last


class StepNotes:
    """Warns once when a script calls ``step`` of the optimizer, and once when an update has no gradient.

    The hook on ``optimizer`` keeps neither the engine nor its clock alive. Optimizers without torch's hooks are not
    watched.
    """

    def __init__(self, optimizer: Any, clock: AccumulationClock) -> None:
        self._said: set[str] = set()
        self._optimizer = optimizer
        self.remove()
        if not hasattr(optimizer, "register_step_pre_hook"):
            return
        at = weakref.ref(clock)

        def look(called: Any, args: Any, kwargs: Any) -> None:
            clock = at()
            if clock is not None and not clock.stepping and called is optimizer:  # copies are tried out
                self.beside_engine()

        vars(optimizer)[_WATCH] = optimizer.register_step_pre_hook(look)

    def beside_engine(self) -> None:
        self._say(
            "step() of the optimizer was called instead of engine.step(). Accumulation, schedule, global_steps and the "
            "loss scale do not take part in it, and an optimizer whose gradients or master weights the engine keeps "
            "updates nothing. Call engine.step() after every micro-batch."
        )

    def no_gradient(self) -> None:
        self._say(
            "engine.step() without a gradient: no backward has reached the model's parameters since the last update. "
            "Nothing is trained, but the step counts and the schedule advances. Call engine.backward(loss) before it."
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log_dist(text, ranks=[0], level=logging.WARNING)

    def remove(self) -> None:
        """Remove the hook of whichever engine watches the optimizer."""
        handle = vars(self._optimizer).pop(_WATCH, None)
        if handle is not None:
            handle.remove()
