from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed.base.exceptions import DeprecatedException
from deepspeed.comm import documented_groups as groups
from deepspeed.comm.mesh import ProcessMesh
from tests.pool import distributed

GROUPS_OF_EXPERTS = (groups._get_expert_parallel_group, groups._get_expert_data_parallel_group)


def test_without_anything() -> None:
    assert groups.get_mesh() is None
    assert groups._get_sequence_parallel_group() is None
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (1, 0)
    assert groups.get_data_parallel_group() is None and groups.get_data_parallel_world_size() == 1
    assert groups.get_tensor_model_parallel_src_rank() == 0
    with pytest.raises(DeprecatedException, match="ep_size"):
        groups.initialize(ep_size=2)
    assert groups._get_data_parallel_group.__name__ == "_get_data_parallel_group"


@distributed(world_size=2)
def test_without_a_mesh_all_ranks_are_data_parallel() -> None:
    assert groups.get_data_parallel_group() is dist.group.WORLD
    assert groups._get_sequence_data_parallel_group() is dist.group.WORLD
    assert groups.get_data_parallel_rank() == dist.get_rank() and groups._get_data_parallel_world_size() == 2
    assert groups.get_model_parallel_world_size() == 1 and groups.get_model_parallel_group() is None
    assert groups.get_tensor_model_parallel_src_rank() == dist.get_rank()
    assert groups._get_sequence_parallel_group() is None


@pytest.mark.parametrize("data_before_experts", [False, True])
@distributed(world_size=4)
def test_groups_of_experts_before_there_is_an_engine(data_before_experts: bool) -> None:
    rank = dist.get_rank()
    pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    if data_before_experts:
        pair, across = across, pair
    assert groups._get_expert_parallel_group("ep_size_2") is None
    for _ in range(2):  # the second call finds them
        groups._create_expert_and_data_parallel(2, data_before_experts)
    sharing, same = (f("ep_size_2") for f in GROUPS_OF_EXPERTS)
    assert dist.get_process_group_ranks(sharing) == pair and dist.get_process_group_ranks(same) == across
    assert groups._get_expert_parallel_rank("ep_size_2") == pair.index(rank)
    assert groups._get_expert_parallel_group_dict() == {"ep_size_2": sharing}
    assert groups._get_expert_data_parallel_group_dict() == {"ep_size_2": same}
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=sharing)
    assert total.item() == sum(pair)
    with pytest.raises(ValueError, match="expert_parallel_size_=3"):
        groups._create_expert_and_data_parallel(3)
    try:
        groups.set_mesh(ProcessMesh.build(dp=4))
        groups._create_expert_and_data_parallel(2)
        assert [dist.get_process_group_ranks(f("ep_size_2")) for f in GROUPS_OF_EXPERTS] == [
            [rank // 2 * 2, rank // 2 * 2 + 1],
            [rank % 2, rank % 2 + 2],
        ]
        assert groups._get_max_expert_parallel_group() is groups._get_expert_parallel_group("ep_size_2")
    finally:
        groups.set_mesh(None)
    assert groups._get_expert_parallel_group_dict() == {}


@distributed(world_size=4)
def test_groups_for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, first = dist.get_rank(), dist.get_rank() // 2 * 2
    assert groups._get_max_expert_size() is groups._get_zero_param_intra_parallel_group() is None
    groups._create_expert_and_data_parallel(2)
    groups._create_expert_and_data_parallel(4)
    assert groups._get_max_expert_size_name() == "ep_size_4"
    assert dist.get_world_size(groups._get_max_expert_parallel_group()) == 4
    with pytest.raises(ValueError, match="group_size=3"):
        groups._create_zero_param_parallel_group(3)
    groups._create_zero_param_parallel_group(2)
    group = groups._get_zero_param_intra_parallel_group()
    assert dist.get_process_group_ranks(group) == [first, first + 1]
    with pytest.raises(ValueError, match="already initialized"):
        groups._create_zero_param_parallel_group(2)
    assert list(groups._get_local_all_to_all_group()) == ["local_0"]  # one host
    monkeypatch.setattr(groups.get_accelerator(), "device_count", lambda: 2)
    found = {
        name: dist.get_process_group_ranks(g) for name, g in groups._get_local_all_to_all_group().items()
    }
    assert found == {f"local_{rank // 2}": [first, first + 1], f"global_{rank % 2}": [rank % 2, rank % 2 + 2]}
    groups.set_mesh(None)
    assert groups._get_zero_param_intra_parallel_group() is None


def test_the_groups_of_a_model_parallel_unit() -> None:
    from deepspeed.utils.bwc import bwc_pipeline_parallel_group, bwc_tensor_model_parallel_group

    stages, layers = object(), object()
    unit = SimpleNamespace(get_pipe_parallel_group=lambda: stages, get_slice_parallel_group=lambda: layers)
    assert bwc_pipeline_parallel_group(unit) is stages and bwc_tensor_model_parallel_group(unit) is layers
    assert bwc_pipeline_parallel_group() is bwc_tensor_model_parallel_group(mpu=None) is None


def test_groups_of_experts_need_processes() -> None:
    with pytest.raises(RuntimeError, match="init_distributed"):
        groups._create_expert_and_data_parallel(2)


@distributed(world_size=4)
def test_views_of_a_mesh() -> None:
    rank = dist.get_rank()
    try:
        groups.set_mesh(ProcessMesh.build(dp=2, tp=2))
        assert dist.get_process_group_ranks(groups.get_data_parallel_group()) == [rank % 2, rank % 2 + 2]
        assert groups._get_broadcast_src_rank() == rank % 2
        assert (groups.get_tensor_model_parallel_rank(), groups.get_model_parallel_world_size()) == (
            rank % 2,
            2,
        )
        assert groups.get_tensor_model_parallel_src_rank() == rank // 2 * 2
        assert dist.get_process_group_ranks(groups.get_tensor_model_parallel_group())[0] == rank // 2 * 2
        assert groups._get_sequence_parallel_group() is None

        groups.set_mesh(ProcessMesh.build(dp=2, sp=2, ep=2))
        assert dist.get_process_group_ranks(groups._get_sequence_parallel_group())[0] == rank // 2 * 2
        assert (groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()) == (
            rank % 2,
            2,
        )
        assert groups._get_sequence_data_parallel_world_size() == 4
        assert groups._get_sequence_data_parallel_rank() == rank
        assert groups._get_expert_parallel_world_size("ep_size_2") == 2
        assert groups._get_expert_data_parallel_rank("ep_size_2") == rank // 2
    finally:
        groups.set_mesh(None)


def test_tensor_parallel_size_by_hand() -> None:
    groups.set_tensor_model_parallel_world_size(4)
    groups.set_tensor_model_parallel_rank(3)
    assert (groups.get_model_parallel_world_size(), groups.get_model_parallel_rank()) == (4, 3)
    groups.set_mesh(None)
    assert (groups.get_model_parallel_world_size(), groups.get_model_parallel_rank()) == (1, 0)


@distributed(world_size=2)
def test_scripts_put_their_own_groups_of_experts_in_the_tables() -> None:
    own, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in (0, 1)][dist.get_rank()]
    tables = groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP
    tables[0]["ep_size_2"], tables[1]["ep_size_2"] = own, alone
    groups._EXPERT_PARALLEL_GROUP_RANKS["ep_size_2"] = [0, 1]
    assert groups._get_expert_parallel_group("ep_size_2") is own
    assert groups._get_expert_data_parallel_group("ep_size_2") is alone
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2
    assert groups._get_max_expert_size_name() == "ep_size_2"
    groups._create_expert_and_data_parallel(2)  # finds them
    assert list(groups._EXPERT_PARALLEL_GROUP.values()) == [own]
    assert {"ep_size_2": [dist.get_rank()]} == groups._EXPERT_DATA_PARALLEL_GROUP_RANKS
    dist.destroy_process_group(own)
    assert groups._EXPERT_PARALLEL_GROUP == {}
    groups.set_mesh(None)
    assert groups._EXPERT_DATA_PARALLEL_GROUP == {}


def test_a_table_of_groups_that_is_not_here_names_the_getters() -> None:
    with pytest.raises(AttributeError, match=r"_ALL_TO_ALL_GROUP.*_get_\.\.\._group\(\)"):
        _ = groups._ALL_TO_ALL_GROUP
