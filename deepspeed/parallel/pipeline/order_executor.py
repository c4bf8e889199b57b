"""Execution of one batch on one stage: runs the order's actions, with the communication that they need."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.base.logging import logger
from deepspeed.parallel.pipeline.messages.channels import ReceiveChannel, SendChannel
from deepspeed.parallel.pipeline.messages.values import without_graph, writable
from deepspeed.parallel.pipeline.schedules.orders import Action, ActionKind
from deepspeed.zero.gradients.backward import tensors_in


class StageCompute(Protocol):
    """The computation of a stage. An action names its micro-batch and its chunk."""

    def begin(self, action: Action) -> None:
        """Attribute what follows, including waits, to ``action``."""
        ...

    def load(self) -> tuple[Any, Any]:
        """Return inputs and labels of the next micro-batch."""
        ...

    def forward_stage(self, action: Action, inputs: Any, labels: Any) -> Any:
        """Return the outputs of the chunk; the loss if it is the last."""
        ...

    def backward_stage(self, action: Action, outputs: Any, gradients: Sequence[Tensor | None]) -> None:
        """Backpropagate ``gradients`` of the output tensors that require one; the last chunk gets none."""
        ...

    def weights_stage(self, action: Action) -> None:
        """Compute the weight gradients that a split backward has deferred."""
        ...

    def synchronize(self) -> None:
        """Synchronize with the device, for timing."""
        ...


@dataclass(slots=True)
class ChunkChannels:
    """The channels of one chunk to the chunks before and after it; None at the ends of the pipeline."""

    inputs: ReceiveChannel | None = None
    outputs: SendChannel | None = None
    output_gradients: ReceiveChannel | None = None
    input_gradients: SendChannel | None = None

    def post_receives(self, forwards: int, backwards: int) -> None:
        """Post the first receives."""
        if self.inputs is not None:
            self.inputs.post_receives(forwards)
        if self.output_gradients is not None:
            self.output_gradients.post_receives(backwards)

    def flush(self) -> None:
        """Wait until the neighbours have received all messages."""
        for sender in (self.outputs, self.input_gradients):
            if sender is not None:
                sender.flush()


@dataclass(slots=True)
class OrderExecutor:
    """Runs one batch on this stage. Results accumulate: create one per batch.

    ``channels``: by chunk. ``on_backward()`` is called when a micro-batch's backward is complete on this stage;
    ``split``: with its later WEIGHTS actions. ``timed``: record the ``seconds`` of every action by kind, without
    communication. ``peak_held``: the maximum number of (micro-batch, chunk) activations held at a time."""

    work: StageCompute
    channels: Sequence[ChunkChannels]
    stage: int
    training: bool
    split: bool = False
    timed: bool = False
    on_backward: Callable[[], None] = lambda: None
    results: list[Any] = field(default_factory=list)
    """On the stage with the last chunk: results of its ``forward_stage``, by micro-batch."""
    peak_held: int = 0
    seconds: dict[ActionKind, list[float]] = field(default_factory=dict)
    _held: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)
    """Inputs and outputs by micro-batch and chunk."""
    _labels: dict[int, Any] = field(default_factory=dict)
    _alive: int = 0
    _done: Counter[int] = field(default_factory=Counter)
    """Number of chunks whose backward is complete, by micro-batch."""

    def run(self, actions: Sequence[Action]) -> list[Any]:
        """Run all ``actions``. The log names the action at which an exception was raised."""
        remaining = Counter((action.kind, action.chunk) for action in actions)
        for chunk, channels in enumerate(self.channels):
            counts = (remaining[kind, chunk] for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
            channels.post_receives(*counts)
        steps = dict(zip(ActionKind, (self._forward, self._backward, self._weights), strict=True))
        for action in actions:
            remaining[action.kind, action.chunk] -= 1
            self.work.begin(action)
            try:
                steps[action.kind](action, remaining[action.kind, action.chunk])
            except Exception as error:
                logger.error(
                    f"stage {self.stage} failed at micro-batch {action.micro_batch} ({action}): {error!r}"
                )
                raise
        for channels in self.channels:
            channels.flush()
        return self.results

    def buffers(self, micro_batches: int) -> dict[str, list[Any]]:
        """Return the held values by index ``chunk * micro_batches + micro_batch``; None where nothing is held."""
        found: dict[str, list[Any]] = {
            name: [None] * (micro_batches * len(self.channels)) for name in ("inputs", "outputs", "labels")
        }
        for (micro_batch, chunk), held in self._held.items():
            index = chunk * micro_batches + micro_batch
            found["inputs"][index], found["outputs"][index] = held
        for micro_batch, labels in self._labels.items():
            found["labels"][micro_batch] = labels
        return found

    def _forward(self, action: Action, remaining: int) -> None:
        channels = self.channels[action.chunk]
        inputs, labels = self._data(action)
        if channels.inputs is not None:
            inputs = channels.inputs.receive(remaining)
        # Layers may modify their inputs in place, which autograd forbids for leaves.
        given = writable(inputs) if self.training else inputs
        outputs = self._measured(action, lambda: self.work.forward_stage(action, given, labels))
        if channels.outputs is not None:
            channels.outputs.send(outputs)
        else:
            self.results.append(without_graph(outputs))
        if self.training:
            self._held[action.micro_batch, action.chunk] = inputs, outputs
            self._alive += 1
            self.peak_held = max(self.peak_held, self._alive)

    def _data(self, action: Action) -> tuple[Any, Any]:
        """Return inputs for the first chunk and labels for the last; a stage that has both reads the data once."""
        channels = self.channels[action.chunk]
        first, last = channels.inputs is None, channels.outputs is None
        if not (first or last):
            return None, None
        if last and action.micro_batch in self._labels:
            return None, self._labels.pop(action.micro_batch)
        inputs, labels = self.work.load()
        if first and not last and any(other.outputs is None for other in self.channels):
            self._labels[action.micro_batch] = labels
        return inputs, labels

    def _backward(self, action: Action, remaining: int) -> None:
        channels = self.channels[action.chunk]
        inputs, outputs = self._held.pop((action.micro_batch, action.chunk))
        source = channels.output_gradients
        gradients = source.receive(remaining) if source is not None else ()
        self._measured(action, lambda: self.work.backward_stage(action, outputs, gradients))
        if channels.input_gradients is not None:
            channels.input_gradients.send(tuple(t.grad for t in tensors_in(inputs) if t.requires_grad))
        if not self.split:
            self._finish_backward(action)

    def _weights(self, action: Action, remaining: int) -> None:
        self._measured(action, lambda: self.work.weights_stage(action))
        self._finish_backward(action)

    def _finish_backward(self, action: Action) -> None:
        self._alive -= 1
        self._done[action.micro_batch] += 1
        if self._done[action.micro_batch] == len(self.channels):
            self.on_backward()

    def _measured(self, action: Action, do: Callable[[], Any]) -> Any:
        if not self.timed:
            return do()
        self.work.synchronize()
        start = time.perf_counter()
        result = do()
        self.work.synchronize()
        self.seconds.setdefault(action.kind, []).append(time.perf_counter() - start)
        return result


def backward_from(outputs: Any, gradients: Sequence[Tensor | None]) -> None:
    """Backpropagate ``gradients`` of the tensors in ``outputs`` that require one; None: not used downstream."""
    wanted = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    pairs = [(t, g) for t, g in zip(wanted, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
