"""Assignment of heads to ranks: arithmetic, for every number of heads and ranks."""

from __future__ import annotations

import itertools

import pytest

from deepspeed.parallel.sequence.assignment import HeadAssignment, shard_lengths


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_head_of_every_part_has_one_rank_and_its_keys(ranks: int) -> None:
    for kv_heads, group in itertools.product(range(1, 6), (1, 2, 3)):
        heads = kv_heads * group
        plan = HeadAssignment(heads, kv_heads, ranks)
        assert plan.width * plan.head_groups == ranks and (plan.head_groups == 1) == (
            ranks <= heads or ranks == 1
        )
        for number in range(plan.head_groups):
            members = range(number * plan.width, (number + 1) * plan.width)
            computed = [head for rank in members for head in plan.queries_of(rank)]
            assert computed == list(range(heads))
            sizes = [len(plan.queries_of(rank)) for rank in members]
            assert max(sizes) - min(sizes) <= 1
            for rank in members:
                keys = plan.keys_of(rank)
                used = [keys[at] for at in plan.key_of_query(rank)]
                assert used == [head // group for head in plan.queries_of(rank)]
                assert [bool(sent) for sent in plan.queries(rank)] == [to in members for to in range(ranks)]
                if (share := plan.group_of(rank)) is not None:
                    assert len(keys) * share == len(used)


def test_parts_are_what_lies_in_a_group() -> None:
    plan = HeadAssignment(2, 1, 6)
    assert (plan.width, plan.head_groups) == (2, 3)
    assert plan.parts((1, 2, 3, 4, 5, 6)) == (3, 7, 11)
    assert plan.lengths(3, (1, 2, 3, 4, 5, 6)) == (0, 0, 3, 4, 0, 0)


def test_shards_differ_by_a_token_at_most() -> None:
    assert shard_lengths(10, 4) == (3, 3, 2, 2)
    with pytest.raises(ValueError, match="3 tokens cannot be sharded over 4 ranks"):
        shard_lengths(3, 4)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        HeadAssignment(3, 2, 1)
