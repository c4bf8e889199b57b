"""Progressive layer dropping (Zhang and He: Accelerating Training of Transformer-Based Language Models with Progressive
Layer Dropping, 2020).

At step t the deepest layer is kept with probability theta(t) = (1 - theta) exp(-gamma t) + theta; layer i of L is kept
with probability p_i = 1 - (i / L) (1 - theta(t)), i = 1..L, and its residual branch is divided by p_i. A model whose
forward takes ``pld_theta`` implements this itself; in other models, blocks of the stack are skipped.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.base.logging import log_dist
from deepspeed.config.problems import DeepSpeedConfigError

NAME = "progressive_layer_drop"
THETA = "pld_theta"


class ProgressiveLayerDrop:
    """The schedule of theta.

    Args:
        theta: limit of the schedule, between 0 and 1.
        gamma: decay rate per step.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0
        log_dist(f"Enabled progressive layer dropping (theta = {self.theta})", ranks=[0])

    def get_state(self) -> dict[str, Any]:
        """Return the keyword arguments for the model's forward."""
        return {NAME: True, THETA: self.get_theta()}

    def get_theta(self) -> float:
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Set theta for a step."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta


def keep_probability(layer: int, layers: int, theta: float) -> float:
    """Return the keep probability of the ``layer``-th of ``layers``, counted from 1."""
    return 1.0 - layer / layers * (1.0 - theta)


class LayerDropInputs:
    """Before each training forward, updates theta and passes it to the model, or chooses the blocks to skip. The choice
    is equal on every rank, and reproduced by a resumed run."""

    name, after, before = NAME, (), ()

    def __init__(self, schedule: ProgressiveLayerDrop, blocks: Sequence[DroppedBlock] = ()) -> None:
        self.schedule = schedule
        self.blocks = blocks

    def transform(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not facts.training:
            for block in self.blocks:
                block.keep = 1.0
                block.dropped = False
            return args, kwargs
        self.schedule.update_state(facts.step)
        if not self.blocks:
            return args, {**kwargs, **self.schedule.get_state()}
        draws = torch.rand(len(self.blocks), generator=torch.Generator().manual_seed(facts.micro_step))
        for i, (block, draw) in enumerate(zip(self.blocks, draws.tolist(), strict=True), 1):
            block.keep = keep_probability(i, len(self.blocks), self.schedule.get_theta())
            block.dropped = draw >= block.keep
        return args, kwargs


class DroppedBlock:
    """Replacement of a block's ``forward``. ``keep``: current keep probability; ``dropped``: whether this forward skips
    it. The first argument and the first result are the residual stream."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.keep = 1.0
        self.dropped = False
        self._results: int | None = None
        """Length of the tuple of results; 0: a single tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream = args[0] if args else kwargs["hidden_states"]
        if self.dropped and self._results is not None:
            return stream if self._results == 0 else (stream, *[None] * (self._results - 1))
        results = self.forward(*args, **kwargs)
        self._results = len(results) if isinstance(results, tuple) else 0
        if self.keep >= 1.0:
            return results
        output = results[0] if isinstance(results, tuple) else results
        output = stream if self.dropped else stream + (output - stream) * (1.0 / self.keep)
        return (output, *results[1:]) if isinstance(results, tuple) else output


class LayerDrop:
    """The module transform of progressive layer dropping."""

    name, after, before = NAME, (), ()

    def __init__(self, theta: float, gamma: float) -> None:
        self.schedule = ProgressiveLayerDrop(theta, gamma)

    def apply(self, module: nn.Module, context: Any) -> None:
        """Install layer dropping. DeepSpeedConfigError: the model neither takes theta nor has a stack of pre-norm
        blocks."""
        if takes_theta(module):
            context.report("theta is passed to the model")
            context.transform_inputs(LayerDropInputs(self.schedule))
            return
        blocks = list(find_blocks(module) or ())
        if not blocks:
            raise DeepSpeedConfigError(
                f"{type(module).__name__} does not accept {THETA}, and has no stack of pre-norm blocks (a list of "
                f"blocks of one class, followed by a norm) to skip: let its forward accept {NAME} and {THETA}"
            )
        made = []
        for block in blocks:
            dropped = DroppedBlock(block.forward)
            block.forward = dropped  # type: ignore[method-assign]
            made.append(dropped)
        context.report(f"{len(made)} blocks ({type(blocks[0]).__name__}) are randomly skipped")
        context.transform_inputs(LayerDropInputs(self.schedule, made))


def takes_theta(module: nn.Module) -> bool:
    """Return whether the model drops layers itself: its forward has ``pld_theta``, or takes any keyword. (Transformers
    models take any keyword, but ignore it.)"""
    parameters = inspect.signature(module.forward).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return THETA in parameters or (anything and not type(module).__module__.startswith("transformers."))


def find_blocks(module: nn.Module) -> nn.ModuleList | None:
    """Return the longest list of blocks of one class that is followed by a norm: a stack of pre-norm blocks."""
    best: nn.ModuleList | None = None
    for owner in module.modules():
        children = list(owner.named_children())
        for i, (_, child) in enumerate(children):
            stack = isinstance(child, nn.ModuleList) and len(child) > 1 and len(set(map(type, child))) == 1
            if not stack or not any("norm" in type(other).__name__.lower() for _, other in children[i + 1 :]):
                continue
            if best is None or len(child) > len(best):  # type: ignore[arg-type]
                best = child  # type: ignore[assignment]
    return best
