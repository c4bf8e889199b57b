"""Our pages behind Transformers' cache interface. Import only where Transformers is installed."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class StoringBatch(Protocol):
    """The batch of one forward: the last ``count`` of ``length`` tokens are new."""

    count: int
    length: int

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...


class PagedLayer(CacheLayerMixin):
    """One cache layer of one batch."""

    is_sliding = False

    def __init__(self, batch: StoringBatch, index: int) -> None:
        super().__init__()
        self.batch = batch
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the pages are already allocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.batch.update(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.batch.length, 0

    def get_seq_length(self) -> int:
        return self.batch.length - self.batch.count

    def get_max_length(self) -> int:
        return -1


def cache_over(batch: StoringBatch, layers: int) -> Cache:
    """Return the cache for one forward of ``batch``."""
    return Cache(layers=[PagedLayer(batch, index) for index in range(layers)])
