"""Numbers of blocks, handed out and taken back (the documented class; the engine's own is
``inference/cache/blocks.py``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class BlockedAllocator:
    """Hands out the numbers 0 to ``num_blocks - 1``, each to one holder at a time.

    ValueError: there are no blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"BlockedAllocator: num_blocks is {num_blocks}; it must be at least 1")
        self._free = list(range(num_blocks - 1, -1, -1))  # the last is handed out next
        self._held = [False] * num_blocks

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> Tensor:
        """[num_blocks] int32 on the host. ValueError: so many are not free; none is handed out then."""
        if not 0 <= num_blocks <= self.free_blocks:
            raise ValueError(
                f"allocate({num_blocks}): {self.free_blocks} of {len(self._held)} blocks are free"
            )
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._held[block] = True
        return torch.tensor(blocks, dtype=torch.int32)

    def free(self, blocks: Iterable[int] | int) -> None:
        """Take blocks back. ValueError: one of them is not handed out, or named twice; all stay as they are then."""
        numbers = [blocks] if isinstance(blocks, int) else [int(block) for block in blocks]
        wrong = [block for block in numbers if not (0 <= block < len(self._held) and self._held[block])]
        if wrong or len(set(numbers)) < len(numbers):
            raise ValueError(f"free(): {wrong[0] if wrong else numbers} is not handed out, or named twice")
        for block in numbers:
            self._held[block] = False
        self._free += reversed(numbers)
