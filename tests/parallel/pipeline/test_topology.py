"""Topologies by hand, and the grid as the model-parallel unit of an engine."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepspeed.config.axes import MeshLayout
from tests.pool import distributed


def test_ranks_and_coordinates_are_inverse() -> None:
    topology = ProcessTopology(axes=["x", "y", "z"], dims=[2, 3, 4])
    assert topology.world_size() == 24 and topology.get_axis_names() == ["x", "y", "z"]
    for rank, (x, y, z) in enumerate(product(range(2), range(3), range(4))):
        assert topology.get_rank(x=x, y=y, z=z) == rank
        assert tuple(topology.get_coord(rank)) == (x, y, z)
        assert topology.get_coord(rank).y == y
    assert (topology.get_dim("y"), topology.get_dim("other")) == (3, 0)


def test_groups_along_an_axis() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("other") == []
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("data", 1) == [2, 3, 6, 7]
    layout = MeshLayout(pp=2, dp=2, tp=2)  # the mesh counts alike
    assert [list(group) for group in layout.groups("pp")] == topology.get_axis_comm_lists("pipe")
    assert PipeDataParallelTopology(num_pp=2, num_dp=3).get_axis_comm_lists("pipe") == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]


def test_names_of_files() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_rank_repr(rank=3) == "model_01"
    assert topology.get_rank_repr(rank=5, omit_axes=["data"]) == "pipe_01-model_01"
    assert (
        topology.get_rank_repr(rank=5, omit_axes=[], inner_sep="+", outer_sep="_")
        == "pipe+01_data+00_model+01"
    )


def test_wrong_coordinates() -> None:
    topology = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    with pytest.raises(ValueError, match=r"for all axes \['a', 'b'\]"):
        topology.get_rank(a=1)
    with pytest.raises(ValueError, match="outside the topology"):
        topology.get_rank(a=1, b=2)
    with pytest.raises(ValueError, match="rank 4 is outside"):
        topology.get_coord(4)
    with pytest.raises(ValueError, match="2 axes but 1 sizes"):
        ProcessTopology(axes=["a", "b"], dims=[2])


@distributed(world_size=4)
def test_a_grid_names_groups_and_places() -> None:
    rank = dist.get_rank()
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    assert (grid.get_global_rank(), grid.get_stage_id(), grid.get_slice_parallel_rank()) == (
        rank,
        rank // 2,
        rank % 2,
    )
    assert (grid.is_first_stage, grid.is_last_stage) == (rank < 2, rank >= 2)
    assert grid.stage_to_global(1) == 2 + rank % 2 and grid.stage_to_global(0, model=1) == 1
    assert grid.get_data_parallel_group_ranks() == [rank]
    for group, size, place in (
        (grid.get_pipe_parallel_group(), grid.get_pipe_parallel_world_size(), grid.get_pipe_parallel_rank()),
        (grid.get_data_parallel_group(), grid.get_data_parallel_world_size(), grid.get_data_parallel_rank()),
        (
            grid.get_slice_parallel_group(),
            grid.get_slice_parallel_world_size(),
            grid.get_slice_parallel_rank(),
        ),
        (
            grid.get_model_parallel_group(),
            grid.get_model_parallel_world_size(),
            grid.get_model_parallel_rank(),
        ),
    ):
        assert (dist.get_world_size(group), dist.get_rank(group)) == (size, place)
    assert dist.get_process_group_ranks(grid.get_model_parallel_group()) == [0, 1, 2, 3]
    assert PipelineParallelGrid().topology().dims == [2, 2]
    with pytest.raises(ValueError, match="has 8 ranks, {'pipe': 4, 'data': 2}, but the job has 4"):
        PipelineParallelGrid(PipeDataParallelTopology(num_pp=4, num_dp=2))


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=4)
def test_a_grid_is_a_model_parallel_unit(stage: int) -> None:
    """Two replicas of two stages, each with its own layer: gradients are averaged within a stage, and the norm is that
    of both stages."""
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2))
    torch.manual_seed(grid.get_stage_id())
    model = nn.Linear(5, 3)
    engine = deepspeed.initialize(
        model=model,
        mpu=grid,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )[0]
    assert (engine.mesh.size("pp"), engine.dp_world_size, engine.train_batch_size()) == (2, 2, 4)

    def inputs(stage: int, replica: int) -> torch.Tensor:
        return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * stage + replica))

    plain = []
    for number in range(2):
        torch.manual_seed(number)
        plain.append(nn.Linear(5, 3))
    loss = sum(plain[s](inputs(s, r)).square().mean() / 2 for s in range(2) for r in range(2))
    loss.backward()
    params = [param for layer in plain for param in layer.parameters()]
    norm = nn.utils.clip_grad_norm_(params, 0.1)
    torch.optim.SGD(params, lr=0.5).step()

    engine.backward(engine(inputs(grid.get_stage_id(), grid.get_data_parallel_rank())).square().mean())
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        torch.testing.assert_close(engine.module.weight.detach(), plain[grid.get_stage_id()].weight.detach())
    engine.destroy()
