"""Mesh arithmetic without processes, then groups and communicators with them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.axes import AXES, BASE_AXES, MeshLayout, split_ranks
from tests.pool import distributed

LAYOUTS = [
    MeshLayout(),
    MeshLayout(dp=8),
    MeshLayout(pp=2, dp=4, tp=2),
    MeshLayout(pp=2, dp=2, sp=3, tp=2, ep=2, node=3),
    MeshLayout(dp=6, sp=2, ep=4, node=6),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_outside_the_mesh_have_no_group(layout):
    for rank in (-1, layout.world_size):
        with pytest.raises(ValueError, match="outside"):
            layout.ranks(rank, "dp")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "axes", [*((axis,) for axis in AXES), ("dp", "sp"), ("pp", "tp"), BASE_AXES], ids="-".join
)
def test_groups_cover_every_rank_once(layout, axes):
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert all(list(group) == sorted(group) and len(group) == layout.size(*axes) for group in groups)
    for group in groups:
        assert all(layout.ranks(rank, *axes) == group for rank in group)


def test_a_known_layout():
    layout = MeshLayout(pp=2, dp=2, tp=2)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("pp", "tp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    experts = MeshLayout(dp=8, ep=2, node=4)
    assert experts.groups("ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert experts.groups("expert_dp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert experts.groups("node") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert experts.groups("cross_node") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_errors_name_the_axis_and_the_choices():
    with pytest.raises(ValueError, match="dp=0"):
        MeshLayout(dp=0)
    with pytest.raises(ValueError, match=r"ep=3.*\[1, 2, 4, 8\]"):
        MeshLayout(dp=8, ep=3)
    with pytest.raises(ValueError, match="unknown mesh axis 'data'"):
        MeshLayout(dp=2).size("data")
    with pytest.raises(ValueError, match="world size 6 is not"):
        ProcessMesh.build(6, tp=4, rank=0)
    with pytest.raises(ValueError, match="unknown mesh axis"):
        ProcessMesh.build(2, rank=0).ranks("dq")


def test_one_mesh_per_rank_without_processes():
    for rank in range(16):
        mesh = ProcessMesh.build(16, tp=2, sp=2, ep=4, node=2, rank=rank)
        assert (mesh.size("dp"), mesh.size("dp", "sp"), mesh.size("pp")) == (4, 8, 1)
        assert mesh.ranks("sp", "dp") == mesh.ranks("dp", "sp")
        assert mesh.ranks("tp")[mesh.rank("tp")] == rank
        assert mesh.size("ep") * mesh.size("expert_dp") == mesh.size("node") * mesh.size("cross_node") == 8


def test_split_ranks():
    ranks = (3, 5, 9, 11, 20, 21)
    assert split_ranks(ranks, 11, 2, inner=True) == (9, 11)
    assert split_ranks(ranks, 11, 2, inner=False) == (5, 11, 21)


@distributed(world_size=4)
def test_groups_and_communicators():
    rank = torch_dist.get_rank()
    mesh = ProcessMesh.build(tp=2)
    assert mesh.group("dp", "tp") is torch_dist.group.WORLD is mesh.group(*BASE_AXES)
    assert mesh.group("tp") is mesh.group("tp") is mesh.group("pp", "tp")
    timeout = torch_dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    assert mesh.group("dp")._get_backend(torch.device("cpu")).options._timeout == timeout
    tensor = torch.tensor([float(rank)])
    mesh.communicator("tp").all_reduce(tensor).wait()
    assert tensor.item() == sum(mesh.ranks("tp"))
    mesh.communicator("dp").all_reduce(tensor).wait()
    assert tensor.item() == 6
    alone = mesh.communicator("pp")
    assert (alone.size, alone.group) == (1, None)
    assert torch_dist.get_world_size(mesh.group("pp")) == 1


@distributed(world_size=4)
def test_there_and_back_as_a_device_mesh():
    """The ranks and groups stay: a library that wants a DeviceMesh communicates in the same groups."""
    mesh = ProcessMesh.build(sp=2)
    exported = mesh.device_mesh()
    assert exported.mesh_dim_names == ("dp", "sp") and exported.mesh.tolist() == [[0, 1], [2, 3]]
    assert exported.get_group("sp") is mesh.group("sp") and exported["dp"].size() == 2
    back = ProcessMesh.from_device_mesh(exported)
    assert back.layout == mesh.layout
    assert back.group("sp") is mesh.group("sp") and back.group("dp") is mesh.group("dp")
    plain = ProcessMesh.build().device_mesh()
    assert plain.mesh_dim_names == ("dp",) and plain.mesh.tolist() == [0, 1, 2, 3]
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "sequence_parallel"))
    assert ProcessMesh.from_device_mesh(made).ranks("sp") == mesh.ranks("sp")
    for shape, names, said in (
        ((2, 2), ("rows", "columns"), "must be among"),
        ((2, 2), ("tp", "dp"), r"order them as \['dp', 'tp'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            ProcessMesh.from_device_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
    if torch_dist.get_rank() < 2:
        with pytest.raises(ValueError, match="must hold the job's 4 ranks"):
            ProcessMesh.from_device_mesh(
                DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",), _init_backend=False)
            )


@distributed(world_size=[2, 4])
def test_tensors_distributed_over_the_exported_mesh(world_size):
    """torch's DTensor computes on it, in the groups of the mesh: no group is made that was not there."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = ProcessMesh.build(sp=world_size // 2)
    exported = mesh.device_mesh()
    groups = len(torch_dist.distributed_c10d._world.pg_map)
    torch.manual_seed(0)
    left, right = torch.randn(8, 6), torch.randn(6, 4)
    rows = [Shard(0), *[Replicate()] * (exported.ndim - 1)]
    inner = [*[Replicate()] * (exported.ndim - 1), Shard(0)]
    one = distribute_tensor(left, exported, rows)
    assert one.to_local().shape == (8 // 2, 6)
    product = one @ distribute_tensor(right, exported, inner)
    torch.testing.assert_close(product.full_tensor(), left @ right)
    moved = product.redistribute(placements=[Shard(1), *[Replicate()] * (exported.ndim - 1)])
    assert torch.equal(moved.full_tensor(), product.full_tensor())
    assert len(torch_dist.distributed_c10d._world.pg_map) == groups
    assert exported["dp"].get_group() is mesh.group("dp")


class Megatron:
    """The methods that Megatron-style units have."""

    def __init__(self, tp):
        world, rank = torch_dist.get_world_size(), torch_dist.get_rank()
        make = torch_dist.new_group
        self.tp = [make(list(range(first, first + tp))) for first in range(0, world, tp)][rank // tp]
        self.dp = [make(list(range(first, world, tp))) for first in range(tp)][rank % tp]

    def get_model_parallel_group(self):
        return self.tp

    def get_data_parallel_group(self):
        return self.dp


@distributed(world_size=4)
def test_from_a_model_parallel_unit():
    unit, rank = Megatron(2), torch_dist.get_rank()
    mesh = ProcessMesh.from_mpu(unit)
    assert mesh.group("dp") is unit.dp and mesh.group("tp") is unit.tp
    assert mesh.ranks("tp") == (rank // 2 * 2, rank // 2 * 2 + 1)
    assert (mesh.size("pp"), mesh.size("sp"), mesh.size("ep"), mesh.size("expert_dp")) == (1, 1, 1, 2)
    assert mesh.ranks("dp", "sp") == mesh.ranks("dp")
