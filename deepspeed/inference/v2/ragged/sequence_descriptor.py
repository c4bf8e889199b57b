"""What is known of a sequence: how many of its tokens are in the cache, and in which blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Ids = Tensor | Sequence[Tensor]


class BaseSequenceDescriptor:
    """What a ragged batch asks of a sequence."""

    @property
    def seen_tokens(self) -> int:
        """Tokens whose keys and values are in the cache."""
        raise NotImplementedError

    @property
    def cur_allocated_blocks(self) -> int:
        """Blocks that it has."""
        raise NotImplementedError

    @property
    def kv_blocks_ptr(self) -> int:
        """Address of the numbers of its blocks, on the device."""
        raise NotImplementedError


class PlaceholderSequenceDescriptor(BaseSequenceDescriptor):
    """A sequence without a cache, for batches whose shapes alone matter."""

    def __init__(self, seen_tokens: int = 0, cur_allocated_blocks: int = 0, kv_blocks_ptr: int = 0) -> None:
        self._seen_tokens = seen_tokens
        self._cur_allocated_blocks = cur_allocated_blocks
        self._kv_blocks_ptr = kv_blocks_ptr

    @property
    def seen_tokens(self) -> int:
        return self._seen_tokens

    @property
    def cur_allocated_blocks(self) -> int:
        return self._cur_allocated_blocks

    @property
    def kv_blocks_ptr(self) -> int:
        return self._kv_blocks_ptr


class DSSequenceDescriptor(BaseSequenceDescriptor):
    """A sequence that a ``DSStateManager`` tracks.

    Args:
        tracking_id: its place among all that are tracked.
        kv_cache_ids: for each cache group int32 [allocation groups, blocks], on the device: room for the numbers of its
            blocks.
        kv_cache_ids_shadow: the same on the host.
        max_context: tokens of the longest sequence, -1 if there is no limit.
    """

    def __init__(
        self,
        tracking_id: int,
        kv_cache_ids: tuple[Tensor, ...],
        kv_cache_ids_shadow: tuple[Tensor, ...],
        max_context: int = -1,
    ) -> None:
        self._tracking_id = tracking_id
        self._kv_cache_ids = kv_cache_ids
        self._kv_cache_ids_shadow = kv_cache_ids_shadow
        self._max_context = max_context
        self._blocks = [[0] * shadow.shape[0] for shadow in kv_cache_ids_shadow]
        self._seen_tokens = 0
        self._in_flight_tokens = 0

    @property
    def seen_tokens(self) -> int:
        return self._seen_tokens

    @property
    def in_flight_tokens(self) -> int:
        """Of the forward that is about to run, or runs."""
        return self._in_flight_tokens

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def tracking_id(self) -> int:
        return self._tracking_id

    @property
    def cur_allocated_blocks(self) -> int:
        """Of the first cache group, over its allocation groups."""
        return sum(self._blocks[0])

    @property
    def kv_blocks_ptr(self) -> int:
        """Of the first cache group."""
        return self._kv_cache_ids[0].data_ptr()

    def kv_cache_ids(self, cache_group: int = 0, on_device: bool = False) -> Tensor:
        """[allocation groups, blocks]; what lies behind those that it has means nothing."""
        return (self._kv_cache_ids if on_device else self._kv_cache_ids_shadow)[cache_group]

    def all_block_ids(self, cache_group: int = 0) -> Tensor:
        """The numbers of its blocks, one allocation group after the other, on the host."""
        shadow = self._kv_cache_ids_shadow[cache_group]
        return torch.cat([shadow[row, :count] for row, count in enumerate(self._blocks[cache_group])])

    def pre_forward(self, num_tokens: int) -> None:
        """So many of its tokens are in the next forward."""
        self._in_flight_tokens = num_tokens

    def post_forward(self) -> None:
        """They are in the cache now."""
        self._seen_tokens += self._in_flight_tokens
        self._in_flight_tokens = 0

    def extend_kv_cache(self, new_ids: Ids, cache_group: int = 0) -> None:
        """It has further blocks: numbers for each allocation group, or one tensor if there is one group.

        ValueError: not as many tensors as groups, or more blocks than it may have.
        """
        for row, ids in enumerate(self._of_groups(new_ids, cache_group)):
            count, shadow = self._blocks[cache_group][row], self._kv_cache_ids_shadow[cache_group]
            if count + ids.numel() > shadow.shape[1]:
                raise ValueError(
                    f"a sequence with {count} blocks cannot have {ids.numel()} more: KVCacheConfig."
                    f"max_blocks_per_allocation_group is {shadow.shape[1]}"
                )
            shadow[row, count : count + ids.numel()] = ids
            self._blocks[cache_group][row] += ids.numel()
        self._kv_cache_ids[cache_group].copy_(self._kv_cache_ids_shadow[cache_group])

    def free_kv_cache(self, free_ids: Ids, cache_group: int = 0) -> None:
        """It has these blocks no longer; the others keep their order. ValueError: it does not have one of them."""
        for row, ids in enumerate(self._of_groups(free_ids, cache_group)):
            shadow, count = self._kv_cache_ids_shadow[cache_group], self._blocks[cache_group][row]
            gone, own = set(ids.flatten().tolist()), shadow[row, :count].tolist()
            if not gone <= set(own):
                raise ValueError(f"the sequence does not have block {min(gone - set(own))}")
            kept = [block for block in own if block not in gone]
            shadow[row, : len(kept)] = torch.tensor(kept, dtype=shadow.dtype)
            self._blocks[cache_group][row] = len(kept)
        self._kv_cache_ids[cache_group].copy_(self._kv_cache_ids_shadow[cache_group])

    def _of_groups(self, ids: Ids, cache_group: int) -> list[Tensor]:
        each = [ids] if isinstance(ids, Tensor) else list(ids)
        groups = len(self._blocks[cache_group])
        if len(each) != groups:
            raise ValueError(f"{len(each)} tensors of block numbers for {groups} allocation groups")
        return [ids.cpu() for ids in each]
