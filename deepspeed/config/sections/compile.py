"""The `compile` section (DeepCompile)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deepspeed.config.section import DeepSpeedConfigModel, Int


class CompileConfig(DeepSpeedConfigModel):
    """Graph passes over the compiled module. `engine.compile()` alone needs nothing here."""

    deepcompile: bool = Field(default=False, description="Use the graph passes.")
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = Field(
        default=None, description="Checked against the ZeRO stage, by which passes run."
    )
    free_activation: bool = Field(default=False, description="Free activations between their uses.")
    free_activation_threshold: Int = Field(
        default=10 * 1024 * 1024, ge=0, description="No effect, as `free_activation`."
    )
    offload_activation: bool = Field(default=False, description="Move activations to the host.")
    offload_activation_pin_memory: bool = Field(
        default=True, description="No effect, as `offload_activation`."
    )
    offload_opt_states: bool = Field(default=False, description="Move optimizer state to the host.")
    double_buffer: bool = Field(default=True, description="No effect: graphs do not reduce.")
    symmetric_memory: bool = Field(default=False, description="Collectives over symmetric memory.")
    debug_log: bool = Field(default=False, description="Log what the passes do.")
    offload_parameters: bool = Field(default=False, description="Move parameters to the host.")
    sync_before_reduce: bool = Field(default=False, description="Wait for the device before each reduction.")
    sync_after_reduce: bool = Field(default=False, description="Wait for the device after each reduction.")
    sync_before_allgather: bool = Field(default=False, description="Wait for the device before each gather.")
    sync_after_allgather: bool = Field(default=False, description="Wait for the device after each gather.")
    keep_int_input_tensors: bool = Field(
        default=True, description="No effect: autograd keeps what backward needs."
    )
    keep_all_input_tensors: bool = Field(
        default=False, description="Keep all inputs of the graph alive until backward."
    )
