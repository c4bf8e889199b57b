"""Small documented parts of the ragged engine: block numbers, kinds of activations."""

from __future__ import annotations

import random

import pytest
import torch

from deepspeed.inference.v2.inference_utils import ActivationType, ceil_div, elem_size, is_gated
from deepspeed.inference.v2.ragged.blocked_allocator import BlockedAllocator


def test_blocks_belong_to_one_holder_at_a_time() -> None:
    source, blocks = random.Random(0), BlockedAllocator(12)
    held: list[torch.Tensor] = []
    for _ in range(300):
        wanted = source.randint(1, 5)
        if source.random() < 0.5:
            if wanted > blocks.free_blocks:
                with pytest.raises(ValueError, match="are free"):
                    blocks.allocate(wanted)
            else:
                held.append(blocks.allocate(wanted))
        elif held:
            blocks.free(held.pop(source.randrange(len(held))))
        numbers = [int(n) for each in held for n in each]
        assert len(set(numbers)) == len(numbers) == 12 - blocks.free_blocks
        assert all(0 <= n < 12 for n in numbers)


def test_what_is_not_handed_out_cannot_be_taken_back() -> None:
    blocks = BlockedAllocator(3)
    first = blocks.allocate(2)
    for wrong in ([-1], [3], [int(first[0]), 7], [int(first[0])] * 2, torch.tensor([2])):
        with pytest.raises(ValueError, match="not handed out"):
            blocks.free(wrong)
    assert blocks.free_blocks == 1
    blocks.free(int(first[1]))
    blocks.free(first[:1])
    assert blocks.free_blocks == 3
    with pytest.raises(ValueError, match="at least 1"):
        BlockedAllocator(0)


def test_kinds_and_sizes() -> None:
    gated = {kind.name for kind in ActivationType if is_gated(kind)}
    assert gated == {"GEGLU", "ReGLU", "SiGLU"}
    assert elem_size(torch.bfloat16) == 2 and elem_size(torch.float64) == 8
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
