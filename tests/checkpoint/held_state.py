"""Base of the fakes of an engine's training state: entries, and the shards that this rank holds."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.shards import ShardCut, ShardIndex


@dataclass(frozen=True)
class Entry:
    name: str
    param: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    group_index: int = 0
    shared_names: tuple[str, ...] = ()


class HeldState:
    entries: list[Entry]
    held: list[tuple[ShardIndex, dict[str, Tensor]]]

    def trainable(self) -> list[Entry]:
        return self.entries

    def shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        yield from self.held

    def distinct_shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        return self.shards()

    def cuts(self) -> dict[str, ShardCut]:
        return {}

    def set_scalar_state(self, key: str, values: Mapping[str, Tensor]) -> None:
        for index, tensors in self.held:
            if index.name in values:
                tensors[key].copy_(values[index.name])

    def scalars(self) -> dict[str, Any]:
        return {}

    def pending_gradients(self) -> None:
        return None

    def kinds(self, names: Container[str]) -> set[str]:
        return {kind for index, tensors in self.held if index.name in names for kind in tensors} - {"fp32"}

    def allocate_state(self, names: Container[str]) -> None:
        """It is there."""
