"""What the engine itself writes to the monitors at each optimizer step.

The x axis of every curve is the number of samples processed so far by all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.observe.monitor.monitor import Event, MonitorMaster
from deepspeed.observe.timer import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    DATA_TIMER,
    EXPOSED_COMMUNICATION_TIMER,
    FORWARD_GLOBAL_TIMER,
    STEP_GLOBAL_TIMER,
)

if TYPE_CHECKING:
    from deepspeed.engine.base import EngineBase
    from deepspeed.engine.observers.progress.wall_clock import WallClock

PREFIX = "Train/Samples/"
TIMERS = {
    FORWARD_GLOBAL_TIMER: "elapsed_time_ms_forward",
    BACKWARD_GLOBAL_TIMER: "elapsed_time_ms_backward",
    BACKWARD_INNER_GLOBAL_TIMER: "elapsed_time_ms_backward_inner",
    BACKWARD_REDUCE_GLOBAL_TIMER: "elapsed_time_ms_backward_allreduce",
    STEP_GLOBAL_TIMER: "elapsed_time_ms_step",
    EXPOSED_COMMUNICATION_TIMER: "elapsed_time_ms_exposed_communication",
    DATA_TIMER: "elapsed_time_ms_data",
}


class LossMeter:
    """The loss of one optimizer step, as this rank sees it: the sum of the losses it back-propagated.

    ``engine.backward`` divides each micro-batch's loss by the accumulation steps unless told not to, so the sum is the
    mean over micro-batches, or the sum of what the client divided itself. A plain ``loss.backward()`` does not reveal
    which tensor it started from: then it is the mean of the losses that the forward passes returned. An engine whose
    ranks agree on the loss of a batch, as that of pipelines does, says it itself (``engine.agreed_loss``).

    Nothing is read from the device before ``take``. Only steps between ``listen`` and ``take`` are observed.
    """

    def __init__(self, engine: EngineBase, *, always: bool = False) -> None:
        self._engine, self._events = engine, engine.events
        self._always = always
        self.listening = False
        self._told: list[Tensor] = []
        self._returned: list[Tensor] = []
        if always:
            self.listen()

    def listen(self) -> None:
        """Start observing; a meter that does not listen is never called and costs nothing."""
        if not self.listening:
            self.listening = True
            self._events.on("after_forward", self._after_forward)
            self._events.on("after_backward", self._after_backward)

    def forget(self) -> None:
        """Drop what was observed, and stop listening unless it listens permanently."""
        self._told, self._returned = [], []
        if self.listening and not self._always:
            self.listening = False
            self._events.off("after_forward", self._after_forward)
            self._events.off("after_backward", self._after_backward)

    def take(self) -> float | None:
        """The loss since the last call, None if no tensor that could be one was seen. Waits for the device."""
        told, returned = self._told, self._returned
        self.forget()
        if self._engine.agreed_loss is not None:
            return float(self._engine.agreed_loss)
        if told:
            return float(sum(loss.float() for loss in told))
        if returned:
            return float(sum(loss.float() for loss in returned)) / len(returned)
        return None

    def _after_forward(self, *, outputs: Any, **_: Any) -> None:
        if torch.is_grad_enabled() and (loss := loss_of(outputs)) is not None:
            self._returned.append(loss.detach())

    def _after_backward(self, *, share: Tensor | None = None, **_: Any) -> None:
        if share is not None:
            self._told.append(share.detach())


def loss_of(outputs: Any) -> Tensor | None:
    """The tensor in a module's outputs that appears to be the loss: one element, requiring a gradient, and the only
    output, named ``loss``, or first in a tuple."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        outputs = outputs[0] if outputs else None
    elif not isinstance(outputs, Tensor):
        outputs = getattr(outputs, "loss", None)
    if isinstance(outputs, Tensor) and outputs.numel() == 1 and outputs.requires_grad:
        return outputs
    return None


class Curves:
    """Loss, learning rate, loss scale and times of every optimizer step, for the monitors; on rank 0.

    ``clock``: who takes the times, if someone does.
    """

    def __init__(self, engine: EngineBase, monitor: MonitorMaster, clock: WallClock | None) -> None:
        self.engine = engine
        self.monitor = monitor
        self.clock = clock
        self.meter = LossMeter(engine, always=True)
        self.loss: float | None = None
        self.step = engine.global_steps
        engine.events.on("at_boundary", self.read_loss)
        engine.events.on("after_step", self.write)

    def read_loss(self, **_: Any) -> None:
        """Before the update: the step waits for the end of backward anyway, for the gradient norm."""
        self.loss = self.meter.take()

    def write(self, **_: Any) -> None:
        if self.engine.global_steps == self.step:  # not a boundary
            return
        self.step = self.engine.global_steps
        if self.loss is not None:
            self.engine.losses = self.loss
        self.monitor.write_events(self.events())

    def events(self) -> list[Event]:
        engine, samples = self.engine, self.engine.global_samples
        values: dict[str, float] = {}
        if self.loss is not None:
            values["train_loss"] = self.loss
        if rates := engine.get_lr():
            values["lr"] = rates[0]
        if engine.core is not None and engine.core.scaler.plan.active:
            values["loss_scale"] = engine.core.scaler.scale
        if self.clock is not None:
            values |= {TIMERS[name]: ms for name, ms in self.clock.elapsed_ms.items()}
            for rank, times in self.clock.take_ranks():
                values |= {f"rank{rank}/{TIMERS[name]}": ms for name, ms in times.items()}
        return [(PREFIX + name, value, samples) for name, value in values.items()]
