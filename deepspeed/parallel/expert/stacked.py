"""Finds stacked experts: modules with the weights of all experts of a layer, [experts, ..], as Transformers has them.

Every engine looks for them; ``spreading.py`` puts them on several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.base.sharded import full_shape
from deepspeed.zero.placements import STACKED

if TYPE_CHECKING:
    from deepspeed.comm.collectives import Communicator

_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed")
"""What the experts of Transformers say about their weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The ranks that share the ``total`` experts of a layer, the name of its kind of weights, and whether their
    products may be computed by the kernel of GPUs."""

    ranks: Communicator
    total: int
    group_name: str
    triton: bool = True


def stacked_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that hold stacked experts, by path."""
    for path, each in module.named_modules():
        if all(hasattr(each, flag) for flag in _FLAGS) and "down_proj" in each._parameters:
            yield path, each


def mark_stacks(model: nn.Module) -> None:
    """Mark the parameters of a model that are stacks of the experts' weights."""
    for _, module in stacked_experts(model):
        for param in module.parameters(recurse=False):
            if full_shape(param)[0] == int(module.num_experts):  # type: ignore[arg-type]
                setattr(param, STACKED, True)


def is_spread(module: nn.Module) -> bool:
    """Return whether the module's tokens go to experts on other ranks."""
    return isinstance(getattr(module, "_ds_spread", None), Spread)
