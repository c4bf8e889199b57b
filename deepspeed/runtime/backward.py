"""Recognising a plain ``loss.backward()``: hooks on the outputs of the engine's forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def output_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors with a graph inside outputs made of tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from output_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from output_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from output_tensors(getattr(value, field.name))


class PlainBackward:
    """Calls ``begin`` when autograd reaches an output of the engine, and ``end`` when that graph task is over.

    Registered on outputs rather than on parameters because reentrant checkpointing runs nested graph tasks: only
    the outermost one reaches the outputs. ``active()`` says that the engine runs the backward itself.
    """

    def __init__(
        self, begin: Callable[[], None], end: Callable[[], None], active: Callable[[], bool]
    ) -> None:
        self.begin = begin
        self.end = end
        self.active = active
        self._running = False

    def watch(self, outputs: Any) -> None:
        for tensor in output_tensors(outputs):
            tensor.register_hook(self._reached)

    def _reached(self, grad: Tensor) -> None:
        if self._running or self.active():
            return
        self._running = True
        try:
            self.begin()
        except BaseException:
            self._running = False
            raise
        torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def _over(self) -> None:
        self._running = False
        self.end()
