"""Detect a plain ``loss.backward()`` by hooks on the outputs of the engine's forward."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def output_tensors(value: Any) -> Iterable[Tensor]:
    """Return the tensors of ``tensors_in`` that have a graph."""
    if isinstance(value, Tensor):  # fast path for what most modules return: this runs after every call
        return (value,) if value.grad_fn is not None else ()
    return (tensor for tensor in tensors_in(value) if tensor.grad_fn is not None)


def check_graph(loss: Any) -> None:
    """Raise TypeError or RuntimeError if ``loss`` is not a tensor with a graph."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, not {type(loss).__name__}")
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss does not require grad: it was computed under no_grad, or no trainable parameter took part in it"
        )


def check_scalar(loss: Any) -> None:
    """Raise as ``check_graph``, and ValueError if ``loss`` has more than one element."""
    check_graph(loss)
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must be a scalar, not of shape {tuple(loss.shape)}: reduce it with mean() or sum(), "
            "or call engine.scale(output).backward(gradient) with the gradient of an output"
        )


class GraphTask:
    """A backward in progress; created inside one of its hooks.

    [Note: a backward that fails] Autograd runs the callbacks queued for the end of a graph task only if it succeeds,
    but frees them in either case: a callback that was freed without a call belongs to a backward that failed. This
    holds whichever thread the backward ran on, and needs no waiting.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self.id: int = torch._C._current_graph_task_id()
        self.ended = False

        def close() -> None:
            self.ended = True
            at_end()

        self._close = weakref.ref(close)
        torch.autograd.Variable._execution_engine.queue_callback(close)

    @property
    def failed(self) -> bool:
        return not self.ended and self._close() is None


class _NewestScale:
    """Loss scale of the latest backward that an engine scaled, and the id of its graph task."""

    task = -1
    scale = 1.0


def scaled_loss(loss: Tensor, scale: float) -> Tensor:
    """Return ``loss * scale``, whose backward publishes the scale to the other engines that it reaches."""
    scaled = loss * scale

    def publish(_: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        another = _NewestScale.task == task and _NewestScale.scale != scale
        _NewestScale.task, _NewestScale.scale = task, math.nan if another else scale

    if scaled.requires_grad:
        scaled.register_hook(publish)
    return scaled


def loss_scale_correction(scale: float, *, active: bool) -> float:
    """Return the engine's ``scale`` divided by the loss scale of the backward that reaches it.

    Another engine may have scaled that loss: a discriminator's loss trains the generator, too. ``active``: the engine
    requires a scale.
    """
    found_scale = _NewestScale.scale if _NewestScale.task == torch._C._current_graph_task_id() else None
    if found_scale is None and active:
        raise RuntimeError(
            "Loss scaling is required under fp16, which loss.backward() does not know: call engine.backward(loss), "
            "engine.scale(loss).backward(), or, with the gradient of an output, "
            "engine.scale(output).backward(gradient)."
        )
    if found_scale is not None and math.isnan(found_scale):
        raise RuntimeError(
            "The losses of this backward have different loss scales, so an engine whose gradients pass through others "
            "cannot unscale them: set the same fp16.loss_scale in all configs, or call backward on one loss at a time."
        )
    return scale / (found_scale or 1.0)


def at_least_fp32(loss: Tensor) -> Tensor:
    """Return a 16-bit loss in fp32, so that it can be divided.

    In its own dtype the quotient would be rounded, and where the division has to reduce the loss scale, the backward
    in fp16 would meet the full scale first (65536 is Inf).
    """
    return loss.float() if loss.element_size() < 4 else loss


class PlainBackward:
    """Calls ``begin`` when autograd reaches an output of the engine, and ``end`` when that graph task finishes.

    Hooks are on outputs rather than on parameters because reentrant checkpointing runs nested graph tasks: only the
    outermost one reaches the outputs. ``paused``: the engine itself runs a backward. After a backward that raised,
    ``failed`` is True until ``forget`` is called or the next backward begins. ``scaled``: the loss of the next
    backward is already multiplied by the loss scale.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.begin = begin
        self.end = end
        self.paused = False
        self.scaled = False
        self._task: GraphTask | None = None
        self._end_failed = False

    @property
    def failed(self) -> bool:
        return self._end_failed or (self._task is not None and self._task.failed)

    def forget(self) -> None:
        self._task, self._end_failed, self.scaled = None, False, False

    def watch(self, outputs: Any) -> None:
        for tensor in output_tensors(outputs):
            tensor.register_hook(self._reached)

    def _reached(self, grad: Tensor) -> None:
        if self.paused or (self._task is not None and not self._task.failed):
            return
        self.begin()
        self._task = GraphTask(self._over)

    def _over(self) -> None:
        self._task = None
        try:
            self.end()
        except BaseException:
            self._end_failed = True
            raise
