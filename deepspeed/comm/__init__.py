"""Communication, with the interface of torch.distributed: `from deepspeed import comm as dist`.

Public functions are in `functions.py` (made from `TorchBackend` in `torch.py`) and `init.py`. The training
core uses `collectives.py` (Communicator) and `mesh.py` (ProcessMesh) instead; `transports/` moves the bytes and
`hangs/` explains ranks that wait. Uses `base`, `ops`, `config`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from deepspeed.base.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout

if TYPE_CHECKING:
    from deepspeed.comm.functions import (
        P2POp,
        all_gather,
        all_gather_coalesced,
        all_gather_into_tensor,
        all_gather_object,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        allgather_fn,
        barrier,
        batch_isend_irecv,
        broadcast,
        broadcast_object_list,
        destroy_process_group,
        enable_symm_mem_for_group,
        gather,
        get_all_ranks_from_group,
        get_comm_operation_count,
        get_global_rank,
        get_local_rank,
        get_logged_comm_ops,
        get_rank,
        get_world_group,
        get_world_size,
        has_all_gather_into_tensor,
        has_comm_data,
        has_reduce_scatter_tensor,
        inference_all_reduce,
        initialize_mesh_device,
        irecv,
        is_available,
        is_initialized,
        isend,
        log_summary,
        monitored_barrier,
        new_group,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_fn,
        reduce_scatter_tensor,
        reset_log,
        scatter,
        send,
        set_backend,
    )
    from deepspeed.comm.init import (
        in_aml,
        in_aws_sm,
        in_dlts,
        init_distributed,
        mpi_discovery,
    )
    from deepspeed.comm.logging import comms_logger, configure, timed_op
    from deepspeed.comm.pending import CommunicationError
    from deepspeed.comm.reduce_op import ReduceOp
    from deepspeed.comm.torch import Backend, TorchBackend

__all__ = [
    "Backend", "CommunicationError", "P2POp", "ProcessGroup", "ReduceOp", "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "TorchBackend", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "comms_logger", "configure",
    "default_pg_timeout", "destroy_process_group", "enable_symm_mem_for_group", "gather",
    "get_all_ranks_from_group", "get_comm_operation_count", "get_global_rank", "get_local_rank",
    "get_logged_comm_ops", "get_rank", "get_world_group", "get_world_size", "has_all_gather_into_tensor",
    "has_comm_data", "has_reduce_scatter_tensor",
    "in_aml", "in_aws_sm", "in_dlts", "inference_all_reduce", "init_distributed",
    "initialize_mesh_device", "irecv", "is_available", "is_initialized", "isend", "log_summary",
    "monitored_barrier", "mpi_discovery", "new_group",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_fn",
    "reduce_scatter_tensor", "reset_log", "scatter", "send", "set_backend", "timed_op",
]  # fmt: skip


_HOLDERS = ("init", "logging", "functions", "torch")
"""Modules with the names above; first those that every engine loads."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for holder in _HOLDERS:
            module = importlib.import_module(f"{__name__}.{holder}")
            if name in vars(module):  # missing while the module is being imported
                globals()[name] = vars(module)[name]
                return vars(module)[name]
    if name == "cdb":  # the backend object, None until the process group exists
        return importlib.import_module(f"{__name__}.functions").set_backend()
    if name == "timer":
        return importlib.import_module("deepspeed.observe.timer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
