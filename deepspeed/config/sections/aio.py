"""The `aio` section: asynchronous file access for NVMe offload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from deepspeed.config.section import Int, LenientConfigModel


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
