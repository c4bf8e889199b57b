"""Arguments of communication calls; annotations; groups of ranks by arithmetic."""

from __future__ import annotations

import pytest

from deepspeed.comm.documented_groups import _ensure_divisibility, _get_expert_parallel_ranks


def test_ranks_of_experts_cover_everyone_once_in_both_ways():
    sharing, same = _get_expert_parallel_ranks(world_size=8, tensor_parallel_size_=2, expert_parallel_size_=2)
    assert sharing == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert same == [[0, 4], [2, 6], [1, 5], [3, 7]]
    for by_data in (False, True):
        sharing, same = _get_expert_parallel_ranks(24, 2, 3, 2, use_data_before_expert_parallel_=by_data)
        for groups in (sharing, same):
            assert sorted(rank for group in groups for rank in group) == list(range(24))
        assert all(len(set(a) & set(b)) <= 1 for a in sharing for b in same)
        assert {len(group) for group in sharing} == {3} and {len(group) for group in same} == {2}


@pytest.mark.parametrize("expected", [AssertionError, ValueError])
def test_sizes_that_do_not_divide_are_refused(expected):
    with pytest.raises(expected, match="not divisible"):
        _ensure_divisibility(8, 3)
    with pytest.raises(expected, match="non-zero"):
        _ensure_divisibility(8, 0)
