"""Normalization of the arguments that name the ranks sharing a layer."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from deepspeed.comm.collectives import Communicator, process_network


def communicator_of(group: Communicator | ProcessGroup | None) -> Communicator:
    """Return the communicator of a process group; None means a single rank."""
    if isinstance(group, Communicator):
        return group
    if group is None or group.size() == 1:
        return Communicator(None)
    return process_network.communicator(group).prepare()
