"""Readings of an optimizer step on rank 0: the single source of the monitors' curves and the live page.

The progress line uses the same functions, but reads only the steps that it shows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.accelerator.host_memory import resident_bytes

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine
    from deepspeed.engine.observers.progress.curve_axis import CurveAxis


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One optimizer step; None: unknown.

    ``seconds``: since the end of the previous step; None for the first step of a process or after a load.
    ``samples``, ``tokens``: in this step, over all ranks. ``loss``: this rank's, before the update. ``norm``: global
    gradient norm before clipping. ``scale``: loss scale for the next step, under fp16.
    """

    step: int
    seconds: float | None
    samples: int
    tokens: int | None
    loss: float | None
    rate: float | None
    norm: float | None
    scale: float | None

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.seconds if self.seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds and self.tokens is not None else None


class StepReader:
    """Reads every optimizer step once, before the other observers on rank 0, which use ``latest``."""

    def __init__(self, engine: Engine, axis: CurveAxis) -> None:
        self.engine, self.axis = engine, axis
        self.latest: Reading | None = None
        """Reading of the last step; None before the first."""
        self._meter = LossMeter(engine, always=True)
        self._loss: float | None = None
        self._rows = self._tokens = 0  # of this rank, in this step
        self._begin()
        engine.events.on("before_forward", self._count_tokens)
        engine.events.on("at_boundary", self._read_loss)
        engine.events.on("after_update", self._read)
        engine.events.on("on_load", self._begin)

    def _begin(self, **_: Any) -> None:
        """Restart at the current step; also after a load, when steps and samples jump."""
        self._samples = self.engine.global_samples
        self._ended_s: float | None = None

    def _count_tokens(self, *, inputs: Any = (), kwargs: Any = {}, **_: Any) -> None:  # noqa: B006 - read only
        if torch.is_grad_enabled() and (ids := _token_ids([kwargs.get("input_ids"), *inputs])) is not None:
            self._rows += ids.shape[0]
            self._tokens += ids.numel()

    def _read_loss(self, **_: Any) -> None:
        """Read the loss before the update, where the step waits for backward anyway, for the gradient norm."""
        self._loss = self._meter.take()

    def _read(self, **_: Any) -> None:
        engine = self.engine
        now = time.perf_counter()
        samples = engine.global_samples - self._samples
        tokens = round(samples * self._tokens / self._rows) if self._rows else None
        rates = engine.get_lr()
        scaler = engine.core.scaler if engine.core is not None else None
        self.latest = Reading(
            step=engine.global_steps,
            seconds=None if self._ended_s is None else now - self._ended_s,
            samples=samples,
            tokens=tokens,
            loss=self._loss,
            rate=rates[0] if rates else None,
            norm=engine.get_global_grad_norm(),
            scale=scaler.scale if scaler is not None and scaler.plan.active else None,
        )
        self._loss, self._rows, self._tokens = None, 0, 0
        self._samples, self._ended_s = engine.global_samples, now
        if self.axis.counts_tokens:
            self.axis.advance(samples, tokens)


class LossMeter:
    """The loss of one optimizer step on this rank: the sum of the losses that it back-propagated.

    ``engine.backward`` divides each micro-batch's loss by the accumulation steps by default, so the sum is the mean
    over micro-batches, or the sum of losses that the client scaled. A plain ``loss.backward()`` does not reveal its
    root tensor: then it is the mean of the losses returned by the forwards. An engine whose ranks agree on the batch
    loss (pipelines) sets ``engine.agreed_loss``, which is used instead.

    Nothing is read from the device before ``take``. Only steps between ``listen`` and ``take`` are observed.
    """

    def __init__(self, engine: Engine, *, always: bool = False) -> None:
        self._engine, self._always = engine, always
        self.listening = False
        self._backward_losses: list[Tensor] = []
        self._forward_losses: list[Tensor] = []
        self._subscribers = {
            "after_forward": self._after_forward,
            "after_backward": self._after_backward,
            "on_error": self._drop,  # neither a failed batch nor one that a load drops counts
            "on_load": self._drop,
        }
        if always:
            self.listen()

    def listen(self) -> None:
        """Subscribe to forward and backward; before that the meter costs nothing."""
        if not self.listening:
            self.listening = True
            for event, subscriber in self._subscribers.items():
                self._engine.events.on(event, subscriber)

    def forget(self) -> None:
        """Drop the observed losses, and unsubscribe unless ``always``."""
        self._drop()
        if self.listening and not self._always:
            self.listening = False
            for event, subscriber in self._subscribers.items():
                self._engine.events.off(event, subscriber)

    def take(self) -> float | None:
        """Return the loss since the last call, None if no loss tensor was seen. Synchronizes with the device."""
        backward_losses, forward_losses = self._backward_losses, self._forward_losses
        self.forget()
        if self._engine.agreed_loss is not None:
            return float(self._engine.agreed_loss)
        losses = backward_losses or forward_losses
        if not losses:
            return None
        total = float(sum(loss.float() for loss in losses))
        return total if backward_losses else total / len(losses)

    def _drop(self, **_: Any) -> None:
        self._backward_losses, self._forward_losses = [], []

    def _after_forward(self, *, outputs: Any, **_: Any) -> None:
        if torch.is_grad_enabled() and (loss := loss_of(outputs)) is not None:
            self._forward_losses.append(loss.detach())

    def _after_backward(self, *, share: Tensor | None = None, **_: Any) -> None:
        if share is not None:
            self._backward_losses.append(share.detach())


def loss_of(outputs: Any) -> Tensor | None:
    """Return the loss tensor in a module's outputs: one element, requiring a gradient, and either the only output,
    named ``loss``, or first in a tuple; None if there is none."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        outputs = outputs[0] if outputs else None
    elif not isinstance(outputs, Tensor):
        outputs = getattr(outputs, "loss", None)
    if isinstance(outputs, Tensor) and outputs.numel() == 1 and outputs.requires_grad:
        return outputs
    return None


def tokens_per_sample(inputs: list[Any]) -> int | None:
    """Return the sequence length if there are token ids among the inputs, else None."""
    ids = _token_ids(inputs)
    return None if ids is None else ids.shape[1]


def _token_ids(inputs: list[Any]) -> Tensor | None:
    """Return the first 2-D integer tensor [batch, sequence], None if there is none."""
    for value in inputs:
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32):
            return value
    return None


def total_steps(scheduler: Any) -> int | None:
    """Return the optimizer steps of the whole run, if the learning-rate schedule defines them."""
    for name in ("total_num_steps", "total_steps"):
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def memory_of(device: torch.device) -> int:
    """Return bytes: peak allocated memory of a device, or on CPUs the resident memory of the process."""
    return resident_bytes() if device.type == "cpu" else get_accelerator().max_memory_allocated()
