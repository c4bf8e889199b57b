"""What a call of a communication function is given; annotations; groups of ranks by arithmetic."""

from __future__ import annotations

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.base.annotations import get_annotations, get_annotations_from_namespace
from deepspeed.comm import utils
from deepspeed.comm.documented_groups import _ensure_divisibility, _get_expert_parallel_ranks


def test_the_size_of_a_message_is_that_of_its_tensors():
    message = torch.zeros(6, dtype=torch.float16)
    assert utils.get_msg_size_from_args(dist.all_reduce, message) == 12
    assert utils.get_msg_size_from_args(dist.all_reduce, tensor=message) == 12
    assert utils.get_msg_size_from_args(dist.all_reduce_coalesced, [message, message]) == 24
    assert utils.get_msg_size_from_args(dist.reduce_scatter, torch.zeros(1), [message] * 3) == 36
    assert utils.get_msg_size_from_args(dist.barrier) == 0
    assert utils.get_tensor_position(dist.barrier) == -1 and utils.get_tensor_position(dist.all_reduce) == 0
    assert utils.get_default_args(dist.broadcast)["group"] is None


def test_a_record_says_who_called_where_that_is_asked():
    arguments = {"log_name": "all_reduce", "debug": "train"}
    assert utils.get_debug_log_name(arguments, debug=False) == "all_reduce"
    assert "train" in utils.get_debug_log_name(arguments, debug=True)


def test_annotations_are_those_of_the_class_itself():
    class Base:
        inherited: int

    found: dict[str, object] = {}

    class Meta(type):
        def __new__(cls, name, bases, namespace):
            found.update(get_annotations_from_namespace(namespace))
            return super().__new__(cls, name, bases, namespace)

    class Own(Base, metaclass=Meta):
        own: str

    assert set(get_annotations(Own)) == set(found) == {"own"}
    assert get_annotations_from_namespace({}) == {}


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
