"""The `compile` section (DeepCompile)."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.section import DeepSpeedConfigModel, Int, key


class CompileConfig(DeepSpeedConfigModel):
    """Graph passes over the compiled module. `engine.compile()` alone needs nothing here."""

    deepcompile: bool = key(False, "Use the graph passes.")
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = key(
        None, "Checked against the ZeRO stage, by which passes run."
    )
    free_activation: bool = key(False, "Free activations between their uses.")
    free_activation_threshold: Int = key(10 * 1024 * 1024, "No effect, as `free_activation`.", ge=0)
    offload_activation: bool = key(False, "Move activations to the host.")
    offload_activation_pin_memory: bool = key(True, "No effect, as `offload_activation`.")
    offload_opt_states: bool = key(False, "Move optimizer state to the host.")
    double_buffer: bool = key(True, "No effect: graphs do not reduce.")
    symmetric_memory: bool = key(False, "Collectives over symmetric memory.")
    debug_log: bool = key(False, "Log what the passes do.")
    offload_parameters: bool = key(False, "Move parameters to the host.")
    sync_before_reduce: bool = key(False, "Wait for the device before each reduction.")
    sync_after_reduce: bool = key(False, "Wait for the device after each reduction.")
    sync_before_allgather: bool = key(False, "Wait for the device before each gather.")
    sync_after_allgather: bool = key(False, "Wait for the device after each gather.")
    keep_int_input_tensors: bool = key(True, "No effect: autograd keeps what backward needs.")
    keep_all_input_tensors: bool = key(False, "Keep all inputs of the graph alive until backward.")
