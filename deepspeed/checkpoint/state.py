"""The interface of the training state for saving and loading, independent of the ZeRO stage.

``deepspeed.zero.states.access.StateAccess`` implements ``TrainingState``; the checkpoint code sees nothing else of
the core.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.checkpoint.shards import ShardCut, ShardIndex

MASTER = "fp32"
"""Key of a fragment's master weights, for any dtype."""


class ParamEntry(Protocol):
    """One trainable parameter; ``shared_names`` are its other names in the module."""

    @property
    def name(self) -> str: ...
    @property
    def param(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def group_index(self) -> int: ...
    @property
    def shared_names(self) -> tuple[str, ...]: ...


class TrainingState(Protocol):
    """Live state by parameter: tensors are views, not copies."""

    def trainable(self) -> Sequence[ParamEntry]: ...

    def shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """Yield this rank's fragments: master weights and per-element optimizer state, 1-D, and values such as
        "step"."""
        ...

    def distinct_shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """Yield the ``shards`` that this rank writes: of replicas, one rank writes."""
        ...

    def cuts(self) -> Mapping[str, ShardCut]:
        """Return the cut of each parameter by name; shard ``s`` is written by data-parallel rank ``s``. If a name is
        left out, all fragments are listed instead."""
        ...

    def kinds(self, names: Container[str]) -> set[str]:
        """Return the kinds of state that the optimizer keeps for parameters in ``names`` once it has stepped."""
        ...

    def allocate_state(self, names: Container[str]) -> None:
        """Allocate optimizer state for the parameters in ``names``; reset the others to their state before the first
        update."""
        ...

    def set_scalar_state(self, key: str, values: Mapping[str, Tensor]) -> None:
        """Write a value such as "step" for each parameter in ``values``."""
        ...

    def publish(self) -> None:
        """Refresh the model's weights after a write to the masters. Collective."""
        ...

    def weights_loaded(self) -> None:
        """Refresh the masters after a write to the model's weights, in full and on every rank."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None: ...

    def scalars(self) -> dict[str, Any]: ...

    def load_scalars(self, scalars: dict[str, Any]) -> None: ...

    def pending_gradients(self) -> dict[str, Any] | None:
        """Return this rank's gradients accumulated since the last update, None if there are none."""
        ...

    def load_pending_gradients(self, pending: dict[str, Any] | None) -> None: ...
