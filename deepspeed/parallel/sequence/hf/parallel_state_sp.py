"""The documented model-parallel unit (mpu) of sequence parallelism: groups, sizes and ranks.

Pass the module itself as ``initialize(mpu=...)``. Ranks of one sequence are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.comm import documented_groups as groups
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.axes import MeshLayout


@dataclass
class _SequenceState:
    mesh: ProcessMesh | None = None
    world: ProcessGroup | None = None


_state = _SequenceState()


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Create groups of ``sequence_parallel_size`` consecutive ranks that share a sequence. Repeating it with the same
    size has no effect. Collective.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the size does not divide the world size.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "initialize_sequence_parallel() needs process groups: call deepspeed.init_distributed() first"
        )
    ranks = dist.get_world_size()
    if sequence_parallel_size < 1 or ranks % sequence_parallel_size:
        fitting = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ValueError(
            f"sequence_parallel_size={sequence_parallel_size} does not divide the job's {ranks} ranks; these do: "
            f"{', '.join(map(str, fitting))}"
        )
    mesh = _state.mesh if _state.world is dist.group.WORLD else None
    if mesh is None or mesh.size("sp") != sequence_parallel_size:
        dp = ranks // sequence_parallel_size
        mesh = ProcessMesh(
            dist.get_rank(), {}, layout=MeshLayout(dp=dp, sp=sequence_parallel_size, node=ranks)
        )
        mesh.group("sp")  # creation is collective, so create it now
        _state.mesh, _state.world = mesh, dist.group.WORLD
    groups.set_mesh(mesh)


def _mesh() -> ProcessMesh:
    if _state.mesh is None or _state.world is not dist.group.WORLD:
        raise RuntimeError(
            "the sequence-parallel groups do not exist yet: call initialize_sequence_parallel(size) first"
        )
    return _state.mesh


def get_sequence_parallel_group() -> ProcessGroup:
    """Return the group of the ranks that share a sequence with this one. RuntimeError: there are no groups yet."""
    return _mesh().group("sp")


def get_sequence_data_parallel_group() -> ProcessGroup:
    """Return the group of the ranks that hold the same weights. RuntimeError: there are no groups yet."""
    return _mesh().group("dp", "sp")


def get_sequence_parallel_world_size() -> int:
    return _mesh().size("sp")


def get_sequence_parallel_rank() -> int:
    return _mesh().rank("sp")
