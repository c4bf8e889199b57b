"""Topologies: coordinates of ranks on named axes, and the grid of process groups of a topology.

These are the documented objects for three-dimensional parallelism. A ``PipelineParallelGrid`` is a model-parallel
unit like any other: ``deepspeed.initialize(mpu=grid)`` builds the mesh from its groups (``deepspeed/comm/mesh.py``).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.comm.groups import new_group
from deepspeed.config.problems import DeepSpeedConfigError

PIPE, DATA, MODEL = "pipe", "data", "model"


class ProcessTopology:
    """Ranks on a Cartesian grid: ``axes``, outermost first, of sizes ``dims``; the last axis varies fastest.

    ``mapping``: coordinates (a named tuple of the axes) -> rank.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims):
            raise ValueError(f"got {len(axes)} axes but {len(dims)} sizes: {list(axes)}, {list(dims)}")
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        places = product(*(range(size) for size in self.dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*at): rank for rank, at in enumerate(places)}
        self._coords = list(self.mapping)

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis."""
        return dict(zip(self.axes, self.dims, strict=True))

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at the given coordinates. ValueError: an axis is missing or unknown, or a coordinate is out
        of range."""
        if sorted(coord_kwargs) != sorted(self.axes):
            raise ValueError(
                f"get_rank() needs coordinates for all axes {self.axes}, got {list(coord_kwargs)}; "
                "filter_match() accepts a subset"
            )
        coord = self.ProcessCoord(**coord_kwargs)
        if coord not in self.mapping:
            raise ValueError(f"{coord} is outside the topology of {self.sizes()}")
        return self.mapping[coord]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = (DATA, PIPE), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's coordinates for file names: "model_00" by default, with every axis such as
        "pipe_01-model_00".
        """
        coord = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 if the topology does not have it."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return a rank's coordinates as a named tuple. ValueError: there is no such rank."""
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"rank {rank} is outside the topology of {self.world_size()} ranks")
        return self._coords[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups along an axis, whose ranks differ in that coordinate only. Empty if there is no such
        axis."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        places = product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, at, strict=True))) for at in places]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks at the given coordinates, ascending."""
        wanted = filter_kwargs.items()
        return [
            rank
            for at, rank in self.mapping.items()
            if all(getattr(at, axis) == place for axis, place in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at position ``idx`` of one axis, ascending."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages whose replicas are neighbours, so that gradients, the larger messages, take the faster links."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=[PIPE, DATA], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages, replicas, and layers split over neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=[PIPE, DATA, MODEL], dims=[num_pp, num_dp, num_mp])


def _getter(attribute: str) -> Any:
    """Make the method that returns this attribute."""
    return lambda self: getattr(self, attribute)


class PipelineParallelGrid:
    """The process groups of a topology, as a model-parallel unit. Collective over all ranks.

    ``topology``: by default nearly square, with at least as many stages as replicas. ``process_group``: the ranks of
    the grid, by default all. *Model parallel* means pipelines and split layers together, the ranks that hold one
    replica of the model; *slice* (or *tensor model*) *parallel* means split layers only. ValueError: the topology has
    a different number of ranks.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: ProcessGroup | None = None
    ) -> None:
        self.global_rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._topo = topology if topology is not None else _square(self.world_size)
        if self._topo.world_size() != self.world_size:
            raise ValueError(
                f"the topology has {self._topo.world_size()} ranks, {self._topo.sizes()}, but the job has "
                f"{self.world_size}"
            )
        self._ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.coord = self._topo.get_coord(self.global_rank)
        self.data_parallel_size = max(self._topo.get_dim(DATA), 1)
        self.pipe_parallel_size = max(self._topo.get_dim(PIPE), 1)
        self.model_parallel_size = max(self._topo.get_dim(MODEL), 1)
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id = self.get_stage_id()
        self.replica_id = getattr(self.coord, DATA, 0)
        """Position among the ranks that hold the same weights."""
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_group = self._along(DATA)
        self.pp_group = self._along(PIPE)
        self.slice_group = self._along(MODEL)
        replica = {DATA: self.replica_id} if DATA in self._topo.axes else {}
        self.ds_model_group = self._topo.filter_match(**replica)
        self.dp_proc_group = self._new_group(self.dp_group)
        self.pp_proc_group = self._new_group(self.pp_group)
        self.slice_proc_group = self._new_group(self.slice_group)
        self.ds_model_proc_group = self._new_group(self.ds_model_group)
        self.ds_model_world_size = len(self.ds_model_group)
        self.ds_model_rank = self.ds_model_group.index(self.global_rank)
        self._set_sequence_size(1)

    def share_sequences(self, ranks: int) -> None:
        """Split sequences over each ``ranks`` neighbouring replicas of a stage: *data parallel* then means the ranks
        with other sequences, while ``dp_group`` stays all replicas. Collective over all ranks. DeepSpeedConfigError:
        ``ranks`` does not divide the replicas."""
        if len(self.dp_group) % ranks:
            raise DeepSpeedConfigError(
                f"sequence_parallel_size={ranks} does not divide the {len(self.dp_group)} replicas of a pipeline stage"
            )
        self._set_sequence_size(ranks)

    def _set_sequence_size(self, ranks: int) -> None:
        replicas, place = self.dp_group, self.replica_id
        self.sequence_parallel_size = ranks
        self.data_parallel_size = len(replicas) // ranks
        self.data_parallel_id = self.replica_id // ranks
        self._sequence_group: ProcessGroup | None = None
        self._data_ranks, self._data_group = replicas, self.dp_proc_group
        if ranks > 1:
            first = place - place % ranks
            self._sequence_group = self._new_group(replicas[first : first + ranks])
            self._data_ranks = replicas[place % ranks :: ranks]
            self._data_group = self._new_group(self._data_ranks)

    def _along(self, axis: str) -> list[int]:
        """Return the ranks that differ from this one along ``axis`` only; this rank alone if the topology does not
        have it."""
        elsewhere = {name: at for name, at in self.coord._asdict().items() if name != axis}
        return self._topo.filter_match(**elsewhere)

    def _new_group(self, places: list[int]) -> ProcessGroup:
        return new_group(tuple(self._ranks[place] for place in places))

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_stage_id(self) -> int:
        return getattr(self.coord, PIPE, 0)

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage at this rank's coordinates along the other axes, unless ``kwargs``
        override them."""
        return self._topo.get_rank(**{**self.coord._asdict(), PIPE: stage_id, **kwargs})

    def get_sequence_parallel_rank(self) -> int:
        return self.replica_id % self.sequence_parallel_size

    def get_slice_parallel_rank(self) -> int:
        return getattr(self.coord, MODEL, 0)

    get_global_rank = _getter("global_rank")
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = _getter("stage_id")
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size = _getter("pipe_parallel_size")
    get_pipe_parallel_group = get_pipeline_model_parallel_group = _getter("pp_proc_group")
    get_data_parallel_rank = get_data_parallel_id = _getter("data_parallel_id")
    get_data_parallel_world_size = _getter("data_parallel_size")
    get_data_parallel_group = _getter("_data_group")
    get_data_parallel_group_ranks = _getter("_data_ranks")
    get_sequence_parallel_world_size = _getter("sequence_parallel_size")
    get_sequence_parallel_group = _getter("_sequence_group")
    """The group that shares sequences; None if no sequence is shared."""
    get_sequence_data_parallel_group = _getter("dp_proc_group")
    """The group of all ranks that hold the same weights."""
    get_model_parallel_rank = _getter("ds_model_rank")
    get_model_parallel_world_size = _getter("ds_model_world_size")
    get_model_parallel_group = _getter("ds_model_proc_group")
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = _getter("slice_parallel_size")
    get_slice_parallel_group = get_tensor_model_parallel_group = _getter("slice_proc_group")


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of ``number`` with multiplicity, smallest first: 12 gives [2, 2, 3]."""
    if number <= 0:
        raise ValueError(f"{number} has no prime factors: expected a positive integer")
    factors: list[int] = []
    candidate = 2
    while candidate * candidate <= number:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return factors + [number] if number > 1 else factors


def _square(ranks: int) -> ProcessTopology:
    """Return a nearly square topology, which gets the prime factors in turn."""
    factors = _prime_factors(ranks)
    return PipeDataParallelTopology(num_pp=prod(factors[::2]), num_dp=prod(factors[1::2]))
