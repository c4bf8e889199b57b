"""One batch on one stage: follows an order of actions, and communicates what they need and make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.runtime.pipe.channel import Receiver, Sender
from deepspeed.runtime.pipe.orders import Action, Kind
from deepspeed.utils.logging import logger


class StageWork(Protocol):
    """What a stage computes."""

    def load(self) -> tuple[Any, Any]:
        """Inputs and labels of the next micro-batch."""
        ...

    def forward_stage(self, inputs: Any, labels: Any) -> Any:
        """The outputs; on the last stage the loss."""
        ...

    def backward_stage(self, micro_batch: int, outputs: Any, gradients: Sequence[Tensor | None]) -> None:
        """``gradients``: of the output tensors that require one; on the last stage none is given."""
        ...

    def weights_stage(self, micro_batch: int) -> None:
        """The gradients that a split backward has left."""
        ...


@dataclass(slots=True)
class Links:
    """The channels to the neighbours; None at the ends of the pipeline."""

    inputs: Receiver | None = None
    outputs: Sender | None = None
    output_gradients: Receiver | None = None
    input_gradients: Sender | None = None

    def flush(self) -> None:
        """Wait until the neighbours have received everything."""
        for sender in (self.outputs, self.input_gradients):
            if sender is not None:
                sender.flush()


@dataclass(slots=True)
class _Held:
    inputs: Any
    outputs: Any


@dataclass(slots=True)
class StageRun:
    """``on_backward(micro_batch)`` is called after all of a backward; ``split``: its actions of kind WEIGHTS come
    later. ``held`` are the micro-batches between their forward and their backward; ``most_held`` counts them."""

    work: StageWork
    links: Links
    stage: int
    training: bool
    split: bool = False
    on_backward: Callable[[int], None] = lambda _: None
    results: list[Any] = field(default_factory=list)
    """On the last stage: what ``forward_stage`` returned, by micro-batch."""
    held: dict[int, _Held] = field(default_factory=dict)
    most_held: int = 0

    def run(self, actions: Sequence[Action]) -> list[Any]:
        """Do all of ``actions``. The log says at which one an exception was raised."""
        forwards = sum(action.kind is Kind.FORWARD for action in actions)
        backwards = sum(action.kind is Kind.BACKWARD for action in actions)
        if self.links.inputs is not None:
            self.links.inputs.expect(forwards)
        if self.links.output_gradients is not None:
            self.links.output_gradients.expect(backwards)
        for action in actions:
            try:
                if action.kind is Kind.FORWARD:
                    forwards -= 1
                    self._forward(action.micro_batch, forwards)
                elif action.kind is Kind.WEIGHTS:
                    self._weights(action.micro_batch)
                else:
                    backwards -= 1
                    self._backward(action.micro_batch, backwards)
            except Exception as error:
                logger.error(
                    f"stage {self.stage} failed at micro-batch {action.micro_batch} ({action}): {error!r}"
                )
                raise
        self.links.flush()
        return self.results

    def _forward(self, micro_batch: int, left: int) -> None:
        links = self.links
        first, last = links.inputs is None, links.outputs is None
        inputs, labels = self.work.load() if first or last else (None, None)
        if links.inputs is not None:
            inputs = links.inputs.receive(left)
        outputs = self.work.forward_stage(inputs, labels)
        if links.outputs is not None:
            links.outputs.send(outputs)
        else:
            self.results.append(_without_graph(outputs))
        if self.training:
            self.held[micro_batch] = _Held(inputs, outputs)
            self.most_held = max(self.most_held, len(self.held))

    def _backward(self, micro_batch: int, left: int) -> None:
        links, held = self.links, self.held.pop(micro_batch)
        gradients = links.output_gradients.receive(left) if links.output_gradients is not None else ()
        self.work.backward_stage(micro_batch, held.outputs, gradients)
        if links.input_gradients is not None:
            links.input_gradients.send(tuple(t.grad for t in tensors_in(held.inputs) if t.requires_grad))
        if not self.split:
            self.on_backward(micro_batch)

    def _weights(self, micro_batch: int) -> None:
        self.work.weights_stage(micro_batch)
        self.on_backward(micro_batch)


def tensors_in(value: Any) -> list[Tensor]:
    """In the order in which they are sent."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (tuple, list)) else []


def backward_from(outputs: Any, gradients: Sequence[Tensor | None]) -> None:
    """Back-propagate ``gradients`` of the tensors among ``outputs`` that require one; None: not needed later on."""
    wanted = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    pairs = [(t, g) for t, g in zip(wanted, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def _without_graph(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _without_graph(item) for key, item in value.items()}
    return type(value)(map(_without_graph, value)) if type(value) in (tuple, list) else value
