"""`zero_optimization.offload_param` and `zero_optimization.offload_optimizer` (ZeRO-Offload, ZeRO-Infinity), and the
`aio` section: how their files are read and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from deepspeed.config.section import DeepSpeedConfigModel, Float, Int, LenientConfigModel, pp_int


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

    device: OffloadDeviceEnum = Field(
        default=OffloadDeviceEnum.none, description="Where the parameter shards are kept."
    )
    nvme_path: Path | None = Field(
        default=None, description="Folder for swap files; needed with device `nvme`."
    )
    buffer_count: Int = Field(
        default=5, ge=0, description="Host buffers that parameters pass through on their way from storage."
    )
    buffer_size: Int = Field(default=pp_int(1e8), ge=0, description="Elements in one such buffer.")
    max_in_cpu: Int = Field(
        default=pp_int(1e9), ge=0, description="Elements that stay in host memory with device `nvme`."
    )
    pin_memory: bool = Field(
        default=True, description="Page-locked host memory: faster copies, cannot be swapped out."
    )


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """Master weights, optimizer state and update on the host (stages 1 to 3)."""

    device: OffloadDeviceEnum = Field(
        default=OffloadDeviceEnum.none, description="Where master weights and optimizer state are kept."
    )
    nvme_path: Path | None = Field(
        default=None, description="Folder for swap files; needed with device `nvme`."
    )
    buffer_count: Int = Field(
        default=4,
        ge=0,
        description="Host buffers for swapping; at least the number of state tensors per parameter plus one.",
    )
    pin_memory: bool = Field(
        default=True, description="Page-locked host memory: faster copies, cannot be swapped out."
    )
    pipeline_read: bool = Field(
        default=False, description="Read the next sub-group from storage while one is updated."
    )
    pipeline_write: bool = Field(
        default=False, description="Write the previous sub-group to storage while one is updated."
    )
    fast_init: bool = Field(default=False, description="No effect: swap files are created in one way only.")
    ratio: Float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Fraction of the update that the host does (Twin-Flow); below 1 at stage 3 only.",
    )
    super_offload: bool = Field(
        default=False,
        description="Update on the host while backward runs, and roll back if the step does not confirm "
        "it (SuperOffload); with device `cpu`.",
    )
    cpuadam_cores_perc: Float = Field(
        default=0.8, ge=0.0, le=1.0, description="Fraction of the cores given to the SuperOffload worker."
    )

    @property
    def pipeline(self) -> bool:
        """Tell whether storage traffic overlaps with the update in either direction."""
        return self.pipeline_read or self.pipeline_write


class AioConfig(LenientConfigModel):
    """Options of reading and writing files."""

    block_size: Int = Field(default=1048576, ge=1, description="Bytes per request.")
    queue_depth: Int = Field(default=8, ge=1, description="Requests in flight at one time.")
    intra_op_parallelism: Int = Field(default=1, ge=1, description="Threads that share a read or write.")
    thread_count: Int = Field(
        default=1, ge=1, description="Another name for `intra_op_parallelism`, used when that is not given."
    )
    single_submit: bool = Field(default=False, description="Hand requests to the kernel one by one.")
    overlap_events: bool = Field(
        default=True, description="Submit further requests while waiting for earlier ones."
    )
    use_gds: bool = Field(default=False, description="GPUDirect Storage (NVIDIA GPUs).")

    @model_validator(mode="after")
    def one_number_of_threads(self) -> AioConfig:
        if "intra_op_parallelism" not in self.model_fields_set:
            object.__setattr__(self, "intra_op_parallelism", self.thread_count)
        return self


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    return AioConfig(**param_dict.get("aio", {})).model_dump(exclude={"thread_count"})
