"""Blocks of the paged cache: counts, sharing, and what is forgotten first."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deepspeed.inference.cache.blocks import BlockManager, BlockPool, BlockTable, OutOfBlocksError


def manager(num_blocks: int = 8, block_size: int = 4, **more: Any) -> BlockManager:
    return BlockManager(BlockPool(num_blocks), block_size, **more)


def filled(blocks: BlockManager, tokens: list[int]) -> BlockTable:
    table = BlockTable()
    blocks.match_prefix(table, tokens)
    assert blocks.reserve(table, len(tokens))
    blocks.publish(table, tokens, len(tokens))
    return table


def test_a_table_grows_by_blocks_and_gives_all_back() -> None:
    blocks, table = manager(), BlockTable()
    assert blocks.capacity == 32
    assert blocks.reserve(table, 5) and len(table.blocks) == 2
    assert blocks.reserve(table, 8) and len(table.blocks) == 2
    assert blocks.room(table) == 32
    assert not blocks.reserve(table, 33) and len(table.blocks) == 2
    assert blocks.reserve(table, 32) and blocks.pool.num_free == 0
    blocks.release(table)
    assert table.blocks == [] and blocks.pool.num_free == 8


def test_a_common_beginning_is_shared_by_full_blocks() -> None:
    blocks = manager()
    first = filled(blocks, list(range(10)))
    second = BlockTable()
    assert blocks.found_in_use([*range(8), 70]) == 2
    assert blocks.match_prefix(second, [*range(8), 70]) == 8
    assert second.blocks == first.blocks[:2]
    assert [blocks.pool.uses(block) for block in first.blocks] == [2, 2, 1]
    third = BlockTable()
    assert blocks.match_prefix(third, [*range(4), 60, 61, 62, 63, 64]) == 4


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    blocks = manager()
    filled(blocks, list(range(8)))
    table = BlockTable()
    assert blocks.match_prefix(table, list(range(8))) == 4  # logits of token 7 have to be computed
    assert blocks.match_prefix(BlockTable(), list(range(9))) == 8


def test_the_same_block_after_another_beginning_is_another_one() -> None:
    blocks = manager()
    filled(blocks, [1, 1, 1, 1, 5, 5, 5, 5])
    assert blocks.match_prefix(BlockTable(), [2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0
    assert blocks.match_prefix(BlockTable(), [5, 5, 5, 5, 0]) == 0


def test_released_contents_stay_until_their_blocks_are_needed() -> None:
    blocks = manager(num_blocks=4)
    old = filled(blocks, list(range(8)))
    new = filled(blocks, list(range(100, 108)))
    blocks.release(old)
    blocks.release(new)
    assert blocks.pool.num_free == 4
    taken = BlockTable()
    assert blocks.reserve(taken, 4)  # the end of the one released first is forgotten first
    assert blocks.match_prefix(BlockTable(), [*range(8), 0]) == 4
    again = BlockTable()
    assert blocks.match_prefix(again, [*range(100, 108), 0]) == 8
    assert blocks.pool.num_free == 0


def test_two_that_computed_the_same_keep_their_blocks_and_one_is_found() -> None:
    blocks = manager()
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        blocks.reserve(table, 4)
    for table in tables:
        blocks.publish(table, [1, 2, 3, 4], 4)
    assert tables[0].blocks != tables[1].blocks and tables[0].key == tables[1].key
    blocks.release(tables[1])
    found = BlockTable()
    assert blocks.match_prefix(found, [1, 2, 3, 4, 5]) == 4 and found.blocks == tables[0].blocks


def test_without_sharing_nothing_is_found() -> None:
    blocks = manager(sharing=False)
    filled(blocks, list(range(8)))
    assert blocks.match_prefix(BlockTable(), list(range(9))) == 0


def test_mistakes_are_told() -> None:
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks requested, but only 2 of 2 are free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="block 1 was released"):
        pool.release(1)
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)


def test_counts_hold_through_any_order_of_events() -> None:
    """Uses equal the tables that have a block, contents are found only where they are, nothing is lost."""
    draw = random.Random(1)
    blocks = manager(num_blocks=12, block_size=2)
    held: list[tuple[BlockTable, list[int]]] = []
    stored: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    for _ in range(2000):
        if held and (draw.random() < 0.4 or blocks.pool.num_free < 3):
            blocks.release(held.pop(draw.randrange(len(held)))[0])
        else:
            tokens = [draw.randrange(2) for _ in range(draw.randint(1, 9))]
            table = BlockTable()
            adopted = blocks.match_prefix(table, tokens)
            for index in range(adopted // 2):
                assert stored[table.blocks[index]] == tuple(tokens[: 2 * index + 2])
            if not blocks.reserve(table, len(tokens)):
                blocks.release(table)
                continue
            for index in range(adopted // 2, len(table.blocks)):
                stored[table.blocks[index]] = tuple(tokens[: 2 * index + 2])
            blocks.publish(table, tokens, len(tokens))
            held.append((table, tokens))
        uses = [sum(table.blocks.count(block) for table, _ in held) for block in range(12)]
        assert uses == [blocks.pool.uses(block) for block in range(12)]
        assert blocks.pool.num_free == uses.count(0)


def test_sequences_of_different_spans_share_nothing() -> None:
    """Since keys of the same tokens differ; a restarted sequence is found under its new span."""
    blocks = manager(8, 2, span=lambda length: int(length > 5))
    short, long = filled(blocks, [1, 2, 3, 4, 5]), filled(blocks, [1, 2, 3, 4, 5, 6])
    assert set(short.blocks).isdisjoint(long.blocks)
    assert blocks.found_in_use([1, 2, 3, 4, 9]) == 2 and blocks.found_in_use([1, 2, 3, 4, 9, 9]) == 2
    blocks.release(long)
    assert blocks.found_in_use([1, 2, 3, 4, 9, 9]) == 0
    blocks.restart(short, 7)
    assert short.blocks == [] and blocks.reserve(short, 7)
    blocks.publish(short, [1, 2, 3, 4, 5, 6, 7], 7)
    assert blocks.match_prefix(BlockTable(), [1, 2, 3, 4, 5, 6, 8]) == 6
