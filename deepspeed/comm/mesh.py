"""Named axes of parallelism over the ranks of a job.

`MeshLayout` is the arithmetic (which rank is in which group), `ProcessMesh` adds the process groups.

The ranks form a grid with the axes (pp, dp, sp, tp), the last one varying fastest: ranks of one tensor-parallel group
are neighbours, pipeline stages are far apart. Two more pairs of axes subdivide the dp * sp ranks that hold the same
dense weights:

    ep (neighbours)  x  expert_dp (strided)       experts are spread over ep, replicated over expert_dp
    node (neighbours)  x  cross_node (strided)    ranks of one host, and their counterparts on the others
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from deepspeed.base.environment import default_group
from deepspeed.base.newest import Newest
from deepspeed.comm.collectives import Communicator, Network, process_network
from deepspeed.comm.groups import new_group
from deepspeed.config.axes import AXES, BASE_AXES, DERIVED_AXES, MeshLayout, divisors, split_ranks


class _Use(Enum):
    """Purpose of a group's collectives (Note: two orders)."""

    SUMS = "among ranks with the same weights"
    LAYERS = "among ranks that divide a layer or its inputs"


Groups: TypeAlias = dict[tuple[_Use, tuple[int, ...]], ProcessGroup]

_DEVICE_MESH_AXES = {  # dim names of device meshes -> our axes
    "pp": "pp", "dp": "dp", "data_parallel": "dp", "sp": "sp", "sequence_parallel": "sp", "tp": "tp",
    "tensor_parallel": "tp",
}  # fmt: skip


class ProcessMesh:
    """The mesh of a running job from the view of one rank: sizes, positions, process groups, communicators.

    Groups are created on first use and only by their members, so all ranks must request the same axes in the
    same order. Axes whose groups have the same ranks share one group, with one exception.

    [Note: two orders] Gradient sums start when their bucket is full. On a rank where a parameter is unused that is
    later, and possibly after instead of before an exchange of layers in the same backward (tokens of experts, parts
    of a sequence). Collectives of one group need one order on all ranks. So axes that replicate weights
    (``_Use.SUMS``) and axes that divide a layer (``_Use.LAYERS``) never share a group.
    """

    def __init__(
        self,
        rank: int,
        ranks_of: dict[tuple[str, ...], tuple[int, ...]],
        *,
        groups: Groups | None = None,
        layout: MeshLayout | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """`ranks_of`: ranks of this rank's group over single axes and combinations; missing ones are computed from
        `layout`, or from the axes of size 1. `groups`: existing process groups."""
        self.global_rank = rank
        self.layout = layout
        self._ranks_of = {_key(axes): ranks for axes, ranks in ranks_of.items()}
        self._groups: Groups = dict(groups or {})
        self._timeout = timeout
        self._network = process_network
        self.data_before_experts = False
        """Whether ranks with the same experts are neighbours; otherwise ranks that share a layer's experts are."""
        self.splits_experts = False
        """Whether experts of any layer are split over the tensor-parallel ranks."""
        self.expert_sizes: set[int] = set()
        """Over how many ranks the experts of the layers are distributed."""

    def in_network(self, network: Network) -> ProcessMesh:
        """Return a mesh of the same ranks and groups, with communicators of `network`."""
        result = copy.copy(self)
        result._network = network
        return result

    @classmethod
    def build(
        cls,
        world_size: int | None = None,
        *,
        dp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        sp: int = 1,
        ep: int = 1,
        node: int | None = None,
        rank: int | None = None,
        timeout: timedelta | None = None,
    ) -> ProcessMesh:
        """Build a mesh over all ranks. `dp=None`: the remaining factor. `node=None`: all replicas on one host."""
        own_rank, job_size = default_group() or (0, 1)
        world_size = job_size if world_size is None else world_size
        rank = own_rank if rank is None else rank
        model = tp * pp * sp
        if dp is None:
            dp = world_size // model if model > 0 else 0
        if dp * model != world_size:
            raise ValueError(
                f"world size {world_size} is not dp x tp x pp x sp = {dp} x {tp} x {pp} x {sp}; change the "
                "number of ranks or the parallel sizes"
            )
        layout = MeshLayout(pp=pp, dp=dp, sp=sp, tp=tp, ep=ep, node=dp * sp if node is None else node)
        return cls(rank, {}, layout=layout, timeout=timeout)

    @classmethod
    def from_layout(cls, layout: MeshLayout) -> ProcessMesh:
        """Build the mesh of this job's ranks from a layout of as many ranks. ValueError: their numbers differ."""
        rank, world = default_group() or (0, 1)
        if world != layout.world_size:
            raise ValueError(f"the mesh was planned for {layout.world_size} ranks, but the job has {world}")
        return cls(rank, {}, layout=layout)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> ProcessMesh:
        """Build a mesh with the groups of a torch DeviceMesh, whose dims must have known names."""
        names = mesh.mesh_dim_names or ()
        unknown = [name for name in names if name not in _DEVICE_MESH_AXES]
        if not names or unknown:
            raise ValueError(
                f"device mesh dimensions {list(names)}: the names must be among {', '.join(_DEVICE_MESH_AXES)}"
            )
        ordered = sorted(names, key=lambda name: BASE_AXES.index(_DEVICE_MESH_AXES[name]))
        if list(names) != ordered:
            raise ValueError(f"device mesh dimensions {list(names)}: order them as {ordered}")
        _, world = default_group() or (0, 1)
        if not torch.equal(mesh.mesh.flatten(), torch.arange(world)):
            raise ValueError(f"the device mesh must hold the job's {world} ranks in ascending order")
        sizes = {_DEVICE_MESH_AXES[name]: mesh.size(i) for i, name in enumerate(names)}
        layout = MeshLayout(**sizes, node=sizes.get("dp", 1) * sizes.get("sp", 1))
        groups: Groups = {}
        for i, name in enumerate(names):
            group = mesh.get_group(i)
            use = _use_of((_DEVICE_MESH_AXES[name],))
            groups[use, tuple(dist.get_process_group_ranks(group))] = group
        return cls(dist.get_rank(), {}, groups=groups, layout=layout)

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Return the same ranks and groups as a torch DeviceMesh, for libraries that need one. Its dims are the axes
        with more than one rank (and always dp), outermost first. Collective."""
        if self.layout is None:
            raise ValueError(
                "a device mesh needs the positions of all ranks, which a model-parallel unit does not provide"
            )
        axes = [axis for axis in BASE_AXES if axis == "dp" or self.size(axis) > 1]
        ranks = torch.arange(self.layout.world_size).view([self.size(axis) for axis in axes])
        groups = [self.group(axis) for axis in axes]
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))

    @classmethod
    def from_mpu(cls, mpu: Any) -> ProcessMesh:
        """Build a mesh with the groups of a Megatron-style model-parallel unit; axes that it lacks get size 1."""
        rank, _ = default_group() or (0, 1)
        ranks_of: dict[tuple[str, ...], tuple[int, ...]] = {}
        groups: Groups = {}
        for axes, getters in _MPU_GROUPS.items():
            group = _mpu_group(mpu, getters)
            if group is not None:
                ranks = tuple(dist.get_process_group_ranks(group))
                ranks_of[axes] = ranks
                groups.setdefault((_use_of(axes), ranks), group)
        for use, ranks in list(groups):
            if use is _Use.SUMS and groups.get((_Use.LAYERS, ranks)) is groups[use, ranks]:
                del groups[use, ranks]  # used by the unit's layers (Note: two orders)
        if ("tp",) not in ranks_of and ("pp",) not in ranks_of and ("pp", "tp") in ranks_of:
            ranks_of[("tp",)] = ranks_of[("pp", "tp")]  # units without pipelines call tensor parallel "model"
        if ("sp",) in ranks_of and ranks_of.keys() <= {("sp",), ("dp", "sp")}:
            # A unit for sequence parallelism only: the rest is data-parallel.
            ranks_of = _around_sequences(rank, ranks_of[("sp",)]) | ranks_of
        for axis in BASE_AXES:
            ranks_of.setdefault((axis,), (rank,))
        return cls(rank, ranks_of, groups=groups)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group over these axes."""
        key = _key(axes)
        found = self._ranks_of.get(key)
        if found is None:
            found = self._ranks_of[key] = self._compute_ranks(key)
        return found

    def size(self, *axes: str) -> int:
        return len(self.ranks(*axes))

    def rank(self, *axes: str) -> int:
        """Return the position of this process in its group over these axes."""
        return self.ranks(*axes).index(self.global_rank)

    def group(self, *axes: str) -> ProcessGroup:
        """Return the process group over these axes (created on first use: collective among its members)."""
        return self._group(self.ranks(*axes), _use_of(_key(axes)))

    def _group(self, ranks: tuple[int, ...], use: _Use) -> ProcessGroup:
        """Return the group of these ranks for this use (Note: two orders)."""
        found = self._groups.get((use, ranks))
        if found is None:
            several = len(ranks) > 1  # one rank alone has no order to keep
            if several and use is _Use.SUMS and ranks == self.ranks("sp"):
                # So that layers get the default group, which scripts pass to them, if it is one of the two.
                self.group("sp")
            other = _Use.LAYERS if use is _Use.SUMS else _Use.SUMS
            separate = several and (other, ranks) in self._groups
            found = self._groups[use, ranks] = new_group(ranks, timeout=self._timeout, separate=separate)
        return found

    def communicator(self, *axes: str) -> Communicator:
        """Return the communicator over these axes; a single rank needs no process group."""
        if self.size(*axes) == 1:
            return Communicator(None)
        return self._network.communicator(self.group(*axes)).prepare()

    def sharing_experts(self, size: int, *, same: bool = False) -> tuple[int, ...]:
        """Return the ``size`` ranks, of those with the same dense weights, over which a layer's experts are
        distributed; ``same``: the ranks that hold the same experts as this one instead.

        Raises:
            ValueError: ``size`` does not divide these ranks.
        """
        ranks = self.ranks("dp", "sp")
        if size < 1 or len(ranks) % size:
            raise ValueError(
                f"ep_size={size} does not divide the {len(ranks)} ranks with the same dense weights: use one of "
                f"{divisors(len(ranks))}"
            )
        if self.data_before_experts:
            return split_ranks(ranks, self.global_rank, len(ranks) // size, inner=same)
        return split_ranks(ranks, self.global_rank, size, inner=not same)

    def among(self, ranks: tuple[int, ...], *, same: bool = False) -> Communicator:
        """Return the communicator of ``ranks``, which include this one (created on first use: collective among them),
        for layers that they divide; ``same``: for sums over ranks with the same weights."""
        if len(ranks) == 1:
            return Communicator(None)
        return self._network.communicator(self._group(ranks, _Use.SUMS if same else _Use.LAYERS)).prepare()

    def _compute_ranks(self, key: tuple[str, ...]) -> tuple[int, ...]:
        if self.layout is not None:
            return self.layout.ranks(self.global_rank, *key)
        if len(key) == 1 and key[0] in DERIVED_AXES:
            # Undivided: ep and cross_node have size 1, expert_dp and node span all replicas.
            _, inner = DERIVED_AXES[key[0]]
            whole = inner == (DERIVED_AXES[key[0]][0] == "node")
            return self.ranks("dp", "sp") if whole else (self.global_rank,)
        for axis in key:
            if (axis,) not in self._ranks_of:
                raise ValueError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
        wide = [axis for axis in key if self.size(axis) > 1]
        if len(wide) > 1:
            _, world = default_group() or (0, 1)
            if math.prod(self.size(axis) for axis in wide) == world:
                return tuple(range(world))
            raise ValueError(f"the model-parallel unit has no group over {' x '.join(wide)}")
        return self.ranks(wide[0]) if wide else (self.global_rank,)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={self.size(axis)}" for axis in BASE_AXES)
        return f"ProcessMesh(rank {self.global_rank}: {sizes})"


def _use_of(axes: tuple[str, ...]) -> _Use:
    return _Use.LAYERS if {"dp", "expert_dp", "node", "cross_node"}.isdisjoint(axes) else _Use.SUMS


def _key(axes: Sequence[str]) -> tuple[str, ...]:
    """Return axes in canonical order, so that ("sp", "dp") and ("dp", "sp") are one group."""
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
    return tuple(sorted(set(axes), key=AXES.index))


# Axes -> methods of a model-parallel unit that return their group; the first that exists is used.
_MPU_GROUPS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("dp",): ("get_data_parallel_group",),
    ("tp",): ("get_tensor_model_parallel_group", "get_slice_parallel_group"),
    ("pp",): ("get_pipe_parallel_group", "get_pipeline_model_parallel_group"),
    ("sp",): ("get_sequence_parallel_group",),
    ("pp", "tp"): ("get_model_parallel_group",),
    ("dp", "sp"): ("get_sequence_data_parallel_group",),
    ("ep",): ("get_expert_model_parallel_group", "get_expert_parallel_group"),
    ("expert_dp",): ("get_expert_data_parallel_group",),
}


def _around_sequences(rank: int, sequence: tuple[int, ...]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the groups over dp and over dp x sp, given the group of ranks that share a sequence."""
    _, world = default_group() or (0, 1)
    size = len(sequence)
    if world % size or sequence != tuple(range(rank - rank % size, rank - rank % size + size)):
        raise ValueError(
            "the model-parallel unit has no data-parallel group, and its sequence-parallel group "
            f"{list(sequence)} is not a run of {size} consecutive ranks of {world}; give it "
            "get_data_parallel_group() and get_sequence_data_parallel_group()"
        )
    return {("dp",): tuple(range(rank % size, world, size)), ("dp", "sp"): tuple(range(world))}


def _mpu_group(mpu: Any, getters: Sequence[str]) -> ProcessGroup | None:
    for getter in getters:
        method = getattr(mpu, getter, None)
        if method is None:
            continue
        try:
            group = method()
        except (AssertionError, TypeError):  # Megatron asserts on groups that were not initialised
            continue
        if isinstance(group, ProcessGroup):
            return group
    return None


@dataclass
class Meshes:
    """The meshes of this process's engines, which ``documented_groups.py`` reports."""

    engines: Newest[ProcessMesh] = field(default_factory=Newest[ProcessMesh])
    by_hand: ProcessMesh | None = None
    # Set by code that reads tensor-parallel checkpoints without running in parallel.
    tensor_parallel: dict[str, int] = field(default_factory=dict[str, int])

    def follow(self, mesh: ProcessMesh) -> None:
        """Make the getters report ``mesh`` of a new engine, until the engine is destroyed or a newer one is made."""
        self.engines.add(mesh)
        self.by_hand = None
        self.tensor_parallel.clear()

    def leave(self, mesh: ProcessMesh) -> None:
        """Make the getters report the previous mesh, as the engine of ``mesh`` is destroyed."""
        self.engines.remove(mesh)


meshes = Meshes()
