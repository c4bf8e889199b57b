"""Keys and values in blocks, as tensors of the documented layout (the engine's own pages are
``inference/cache/pages.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.collectives import communicator
from deepspeed.inference.v2.inference_utils import DtypeEnum
from deepspeed.inference.v2.ragged.blocked_allocator import BlockedAllocator
from deepspeed.inference.v2.ragged.manager_configs import AllocationMode, KVCacheConfig, MemoryConfig


def split_kv(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, block size, heads, head size], views of a cache [blocks, block size, 2, ..]."""
    if kv_cache.dim() != 5 or kv_cache.shape[2] != 2:
        raise ValueError(
            f"split_kv takes [blocks, block size, 2, heads, head size], not {list(kv_cache.shape)}"
        )
    return kv_cache[:, :, 0], kv_cache[:, :, 1]


class BlockedKVCache:
    """A cache for each of ``configs`` (its ``cache_shape``: caches, heads, head size).

    Args:
        configs: one for each cache group.
        memory_config: how many blocks: counted, or what memory has beside the bytes that stay free. All groups have the
            same number.
        mp_group: ranks that have the same number of blocks, the smallest that one of them can have.
        offload: whether blocks may be moved to the host.

    ValueError: memory holds no block.
    """

    def __init__(
        self,
        configs: Sequence[KVCacheConfig] | KVCacheConfig,
        memory_config: MemoryConfig,
        mp_group: Any | None = None,
        offload: bool = False,
    ) -> None:
        self._configs = (configs,) if isinstance(configs, KVCacheConfig) else tuple(configs)
        self._offloads = offload
        count = self._num_blocks(memory_config, mp_group)
        self._allocators = tuple(BlockedAllocator(count) for _ in self._configs)
        device = get_accelerator().current_device_name()
        self._caches = tuple(
            torch.zeros(
                (caches, count, config.block_size, 2, heads, size),
                dtype=DtypeEnum(config.cache_dtype).value,
                device=device,
            )
            for config in self._configs
            for caches, heads, size in (config.cache_shape,)
        )
        self._stored: list[dict[int, Tensor]] = [{} for _ in self._configs]
        self._next = 0

    def reserve(self, num_blocks: int, cache_group: int = 0) -> Tensor:
        """int32 [num_blocks] on the host: free blocks. ValueError: there are not as many."""
        return self._allocators[cache_group].allocate(num_blocks)

    def free(self, blocks: Iterable[int] | int, cache_group: int = 0) -> None:
        """Take blocks back. ValueError: one is not reserved."""
        self._allocators[cache_group].free(blocks)

    def offload(self, blocks: Iterable[int], cache_group: int = 0) -> Tensor:
        """Move the content of reserved blocks to the host and free them. Returns int32 numbers, with which ``restore``
        brings it back. ValueError: the cache was made without ``offload``, or a block is not reserved."""
        if not self._offloads:
            raise ValueError("this cache was made without offload=True: its blocks stay on the device")
        numbers = [int(block) for block in blocks]
        kept = self._caches[cache_group][:, numbers].to("cpu", copy=True)
        self.free(numbers, cache_group)
        made = list(range(self._next, self._next + len(numbers)))
        self._next += len(numbers)
        self._stored[cache_group].update(zip(made, kept.unbind(1), strict=True))
        return torch.tensor(made, dtype=torch.int32)

    def restore(self, blocks: Iterable[int], cache_group: int = 0) -> Tensor:
        """int32: blocks with what ``offload`` moved away under these numbers. ValueError: an unknown number, or too few
        free blocks; nothing has happened then."""
        stored, numbers = self._stored[cache_group], [int(block) for block in blocks]
        unknown = [number for number in numbers if number not in stored]
        if unknown:
            raise ValueError(f"restore(): nothing was moved to the host under the number {unknown[0]}")
        found = self.reserve(len(numbers), cache_group)
        for block, number in zip(found.tolist(), numbers, strict=True):
            self._caches[cache_group][:, block] = stored.pop(number).to(self._caches[cache_group].device)
        return found

    def get_cache(self, cache_id: int, cache_group: int = 0) -> Tensor:
        """[blocks, block size, 2, heads, head size] of one of a group's caches."""
        return self._caches[cache_group][cache_id]

    @property
    def free_blocks(self) -> Tensor:
        """[cache groups]."""
        return torch.tensor([each.free_blocks for each in self._allocators])

    @property
    def num_caches(self) -> int:
        """Cache groups."""
        return len(self._caches)

    def _num_blocks(self, memory: MemoryConfig, mp_group: Any | None) -> int:
        if AllocationMode(memory.mode) is AllocationMode.ALLOCATE:
            return memory.size
        per_block = sum(_block_bytes(config) for config in self._configs)
        accelerator = get_accelerator()
        count = (accelerator.available_memory() - memory.size) // per_block
        if mp_group is not None:
            least = torch.tensor(
                [-float(count)], dtype=torch.float64, device=accelerator.current_device_name()
            )
            communicator(mp_group).all_reduce_max(least).wait()
            count = int(-least.item())
        if count < 1:
            raise ValueError(
                f"memory_config: no block of {per_block} bytes is left beside the {memory.size} bytes that stay free"
            )
        return int(count)


def _block_bytes(config: KVCacheConfig) -> int:
    caches, heads, size = config.cache_shape
    return caches * config.block_size * 2 * heads * size * DtypeEnum(config.cache_dtype).value.itemsize
