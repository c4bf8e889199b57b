"""The ranks that share a layer, however they are given."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from deepspeed.comm import documented_groups as groups
from deepspeed.comm.collectives import Communicator, process_network
from deepspeed.comm.mesh import ProcessMesh

__all__ = ["communicator_of", "init_tp_mesh_device"]


def communicator_of(group: Communicator | ProcessGroup | None) -> Communicator:
    """Return the communicator of a process group; None is one rank alone."""
    if isinstance(group, Communicator):
        return group
    if group is None or group.size() == 1:
        return Communicator(None)
    return process_network.communicator(group).prepare()


def init_tp_mesh_device(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """The groups (data-parallel, tensor-parallel) of a job, which ``deepspeed.comm.documented_groups`` reports from
    now on, until an engine is built; those of its mesh, if it has one that shares layers. Collective.

    ValueError: the number of ranks is not the product of both sizes.
    """
    if groups.get_mesh() is None or groups.get_tensor_model_parallel_world_size() == 1:
        groups.set_mesh(ProcessMesh.build(tp=tensor_model_parallel_size, dp=data_parallel_size))
    return groups.get_data_parallel_group(), groups.get_tensor_model_parallel_group()
