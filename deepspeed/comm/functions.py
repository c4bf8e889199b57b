"""Public operations of `deepspeed.comm`: TorchBackend's, with the arguments of the communication log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.init import get_local_rank as get_local_rank  # documented here
from deepspeed.comm.init import require_initialized, tell_accelerate
from deepspeed.comm.logging import newest_log, paused_log, timed_op
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.comm.torch import TorchBackend

backend = TorchBackend(None, None, None)  # holds no state: the process groups are torch.distributed's

# ---- recorded operations, with the argument that is the message

broadcast = timed_op(backend.broadcast)
all_gather = timed_op(backend.all_gather)
all_gather_object = timed_op(backend.all_gather_object, "obj")
all_gather_into_tensor = timed_op(
    backend.all_gather_into_tensor, "input_tensor", renamed={"input_tensor": "tensor"}
)
reduce_scatter = timed_op(backend.reduce_scatter, "output")
reduce_scatter_tensor = timed_op(
    backend.reduce_scatter_tensor, "output_tensor", renamed={"input_tensor": "tensor"}
)
all_reduce = timed_op(backend.all_reduce)
inference_all_reduce = timed_op(backend.inference_all_reduce)
all_reduce_coalesced = timed_op(backend.all_reduce_coalesced, "tensors")
all_to_all_single = timed_op(backend.all_to_all_single, "input", renamed={"input": "tensor"})
reduce = timed_op(backend.reduce)
gather = timed_op(backend.gather)
scatter = timed_op(backend.scatter)
send = timed_op(backend.send)
recv = timed_op(backend.recv)
isend = timed_op(backend.isend)
irecv = timed_op(backend.irecv)
batch_isend_irecv = timed_op(backend.batch_isend_irecv, "")
barrier = timed_op(backend.barrier, "")
monitored_barrier = timed_op(backend.monitored_barrier, "")


class P2POp:
    """Operation for ``batch_isend_irecv``. ``peer``: global rank of the receiver or sender. ValueError: ``op`` is not
    this package's ``isend`` or ``irecv``."""

    def __init__(
        self, op: Any, tensor: Tensor, peer: int, group: ProcessGroup | None = None, tag: int = 0
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(
                f"P2POp: op={getattr(op, '__name__', op)!r} of {getattr(op, '__module__', '?')}: must be "
                "deepspeed.comm.isend or deepspeed.comm.irecv"
            )
        self.op = "isend" if op is isend else "irecv"
        self.tensor, self.peer, self.group, self.tag = tensor, peer, group, tag


# ---- not recorded separately

broadcast_object_list = backend.broadcast_object_list
all_gather_coalesced = backend.all_gather_coalesced
all_to_all = backend.all_to_all


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Any:
    """Run the flat all_gather, recorded as all_gather_into_tensor."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op, debug=debug)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    debug: str | None = None,
) -> Any:
    """Run the flat reduce_scatter, recorded as reduce_scatter_tensor."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof=prof, debug=debug)


has_all_gather_into_tensor = backend.has_all_gather_into_tensor
has_reduce_scatter_tensor = backend.has_reduce_scatter_tensor

# ---- groups and ranks

is_available = dist.is_available
destroy_process_group = backend.destroy_process_group


def is_initialized() -> bool:
    """Return whether the default process group exists, even if a script created it."""
    exists = dist.is_available() and dist.is_initialized()
    if exists:
        tell_accelerate(dist.get_backend())  # Accelerate calls this, and creates no group if one exists
    return exists


def new_group(ranks: Sequence[int]) -> Any:
    """Create a group of these ranks with the job's timeout; every rank of the job calls this."""
    require_initialized("new_group")
    return backend.new_group(ranks)


def get_world_group() -> Any:
    require_initialized("get_world_group")
    return backend.get_world_group()


def get_world_size(group: ProcessGroup | None = None) -> int:
    require_initialized("get_world_size")
    return dist.get_world_size(group)


def get_rank(group: ProcessGroup | None = None) -> int:
    require_initialized("get_rank")
    return dist.get_rank(group)


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    require_initialized("get_global_rank")
    return backend.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of a group, in group order."""
    require_initialized("get_all_ranks_from_group")
    return backend.get_all_ranks_from_group(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Create a torch DeviceMesh, for instance (4, 2) and ("data_parallel", "sequence_parallel")."""
    require_initialized("initialize_mesh_device")
    return backend.init_device_mesh(mesh_shape, mesh_dim_names)


def set_backend() -> TorchBackend | None:
    """Return the backend object in use (there is one kind); None before initialisation."""
    return backend if is_initialized() else None


def enable_symm_mem_for_group(group_name: str) -> None:
    """Enable symmetric memory for a CUDA group, by its torch name."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group as enable

    enable(group_name)  # pyright: ignore[reportArgumentType]  (a str at run time)


# ---- the communication log


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print on rank 0, per operation and message size: count, latency, algorithm and bus bandwidth.

    With `show_straggler` (all ranks must call it) also how long ranks waited for the slowest.
    `return_dict`: return the numbers.
    """
    first = not is_initialized() or dist.get_rank() == 0
    with paused_log():
        return newest_log().log_all(print_log=first, show_straggler=show_straggler, return_dict=return_dict)


def reset_log() -> None:
    newest_log().reset_data()


def has_comm_data() -> bool:
    return newest_log().has_data()


def get_comm_operation_count() -> int:
    return newest_log().get_total_operations()


def get_logged_comm_ops() -> list[str]:
    return newest_log().get_operation_names()
