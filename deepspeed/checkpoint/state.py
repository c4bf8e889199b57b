"""The interface by which saving and loading use the training state, whatever the ZeRO stage.

``deepspeed.zero.states.access.StateAccess`` implements ``TrainingState``; it is all the checkpoint code sees
of the core.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.checkpoint.shards import ShardCut, ShardIndex

MASTER = "fp32"
"""Key of a fragment's master weights, whatever their dtype."""


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
    """Live state by parameter: nothing is copied, and writes go through."""

    def trainable(self) -> Sequence[ParamEntry]: ...

    def shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """This rank's fragments: master weights and per-element optimizer state, 1-D, and values such as
        "step"."""
        ...

    def distinct_shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """Yield those of ``shards`` that this rank writes: one of the ranks that hold the same one does."""
        ...

    def cuts(self) -> Mapping[str, ShardCut]:
        """Return how each parameter is divided, by name: shard ``s`` is what rank ``s`` of those with the same model
        writes. Where it is left out, all fragments are listed."""
        ...

    def keep_state(self, names: Container[str]) -> None:
        """Afterwards the parameters in ``names`` have optimizer state, ready to be written; the others are as before
        their first update."""
        ...

    def set_scalar_state(self, key: str, values: Mapping[str, Tensor]) -> None:
        """Write a value such as "step" for each parameter in ``values``."""
        ...

    def publish(self) -> None:
        """Masters were written: refresh the model's weights. Collective."""
        ...

    def weights_loaded(self) -> None:
        """The model's weights were written, in full and on every rank: refresh the masters."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None: ...

    def scalars(self) -> dict[str, Any]: ...

    def load_scalars(self, scalars: dict[str, Any]) -> None: ...

    def pending_gradients(self) -> dict[str, Any] | None:
        """This rank's gradients since the last update."""
        ...

    def load_pending_gradients(self, pending: dict[str, Any] | None) -> None: ...
