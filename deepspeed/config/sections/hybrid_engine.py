"""The `hybrid_engine` section."""

from __future__ import annotations

from deepspeed.config.section import DeepSpeedConfigModel, Int, key


class HybridEngineConfig(DeepSpeedConfigModel):
    """One engine that trains and generates (RLHF)."""

    enabled: bool = key(False, "`initialize` returns the hybrid engine.")
    max_out_tokens: Int = key(512, "Longest sequence in generation.", ge=1)
    inference_tp_size: Int = key(1, "Ranks that share each layer while generating.", ge=1)
    release_inference_cache: bool = key(
        False, "Give the memory of the key-value cache back to the device after each `generate`."
    )
    pin_parameters: bool = key(
        True, "Keep the memory of split weights between two calls of `generate` (`inference_tp_size`)."
    )
    tp_gather_partition_size: Int = key(8, "Layers gathered at one time when several ranks share them.", ge=1)
    enable_cuda_graph: bool = key(False, "No effect: forwards are not captured as graphs.")
