"""Swapped-out blocks of the paged cache: host copies, for idle sequences of the FastGen engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.inference.cache.pages import PagedCache


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """Host copies of ``count`` blocks: ``pages`` has keys and values per layer."""

    count: int
    pages: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, cache: PagedCache, blocks: Sequence[int]) -> SwappedBlocks:
        """Copy ``blocks`` to the host."""
        pages = {}
        for layer in cache.shapes:
            keys, values = cache.pages(layer)
            at = torch.tensor(blocks, dtype=torch.int64, device=keys.device)
            pages[layer] = (keys.index_select(0, at).cpu(), values.index_select(0, at).cpu())
        return cls(len(blocks), pages)

    def write(self, cache: PagedCache, blocks: Sequence[int]) -> None:
        """Copy the contents into ``count`` blocks of ``cache``."""
        for layer, (keys, values) in self.pages.items():
            to_keys, to_values = cache.pages(layer)
            at = torch.tensor(blocks, dtype=torch.int64, device=to_keys.device)
            to_keys.index_copy_(0, at, keys.to(to_keys.device))
            to_values.index_copy_(0, at, values.to(to_values.device))

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.pages.values())
