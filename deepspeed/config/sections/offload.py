"""`zero_optimization.offload_param` and `zero_optimization.offload_optimizer` (ZeRO-Offload, ZeRO-Infinity), and the
`aio` section: how their files are read and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import model_validator

from deepspeed.config.section import DeepSpeedConfigModel, Float, Int, LenientConfigModel, key, pp_int


class OffloadDeviceEnum(str, Enum):
    """Place of offloaded values: none, host memory, or NVMe storage."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that `engine.offload_states` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """Stage-3 parameters kept outside device memory."""

    device: OffloadDeviceEnum = key(OffloadDeviceEnum.none, "Where to keep parameter shards.")
    nvme_path: Path | None = key(None, "Folder for swap files; needed with device `nvme`.")
    buffer_count: Int = key(5, "Number of host buffers for reading parameters from storage.", ge=0)
    buffer_size: Int = key(pp_int(1e8), "Elements per buffer.", ge=0)
    max_in_cpu: Int = key(pp_int(1e9), "Elements that stay in host memory with device `nvme`.", ge=0)
    pin_memory: bool = key(True, "Page-locked host memory: faster copies, cannot be swapped out.")


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """Master weights, optimizer state and update on the host (stages 1 to 3)."""

    device: OffloadDeviceEnum = key(
        OffloadDeviceEnum.none, "Where to keep master weights and optimizer state."
    )
    nvme_path: Path | None = key(None, "Folder for swap files; needed with device `nvme`.")
    buffer_count: Int = key(
        4,
        "Number of host buffers for swapping; at least one more than the state tensors per parameter.",
        ge=0,
    )
    pin_memory: bool = key(True, "Page-locked host memory: faster copies, cannot be swapped out.")
    pipeline_read: bool = key(False, "Read the next sub-group from storage during an update.")
    pipeline_write: bool = key(False, "Write the previous sub-group to storage during an update.")
    fast_init: bool = key(False, "No effect: swap files are always created in the same way.")
    ratio: Float = key(
        1.0,
        "Fraction of the update that runs on the host (Twin-Flow); below 1 at stage 3 only.",
        ge=0.0,
        le=1.0,
    )
    super_offload: bool = key(
        False,
        "Update on the host while backward runs, and roll back if the step does not confirm "
        "it (SuperOffload); with device `cpu`.",
    )
    cpuadam_cores_perc: Float = key(
        0.8, "Fraction of the cores given to the SuperOffload worker.", ge=0.0, le=1.0
    )

    @property
    def pipeline(self) -> bool:
        """True: storage I/O overlaps with the update in at least one direction."""
        return self.pipeline_read or self.pipeline_write


class AioConfig(LenientConfigModel):
    """Options of reading and writing files."""

    block_size: Int = key(1048576, "Bytes per request.", ge=1)
    queue_depth: Int = key(8, "Requests in flight.", ge=1)
    intra_op_parallelism: Int = key(1, "Threads that share a read or write.", ge=1)
    thread_count: Int = key(1, "Alias of `intra_op_parallelism`, used when that is not given.", ge=1)
    single_submit: bool = key(False, "Submit requests to the kernel one at a time.")
    overlap_events: bool = key(True, "Submit further requests while waiting for earlier ones.")
    use_gds: bool = key(False, "GPUDirect Storage (NVIDIA GPUs).")

    @model_validator(mode="after")
    def one_number_of_threads(self) -> AioConfig:
        if "intra_op_parallelism" not in self.model_fields_set:
            object.__setattr__(self, "intra_op_parallelism", self.thread_count)
        return self


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    return AioConfig(**param_dict.get("aio", {})).model_dump(exclude={"thread_count"})
