"""Sections about how the model computes: recomputation, compiled graphs, sparse attention, tiles, generation."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.config.keys import constant_of
from deepspeed.config.section import DeepSpeedConfigModel, Float, Int, LenientConfigModel, key

# The `activation_checkpointing` section, read by `deepspeed.transforms.recompute.checkpointing.configure`.


ACT_CHKPT = "activation_checkpointing"


class DeepSpeedActivationCheckpointingConfig(LenientConfigModel):
    """Storage of the inputs of checkpointed regions until backward recomputes these."""

    partition_activations: bool = key(False, "Partition the saved inputs across the model-parallel ranks.")
    cpu_checkpointing: bool = key(
        False, "Keep the inputs in host memory, including those of layers that the model itself checkpoints."
    )
    contiguous_memory_optimization: bool = key(
        False, "One buffer for all inputs; needs `number_checkpoints` and `partition_activations`."
    )
    number_checkpoints: Int | None = key(None, "Checkpointed regions per forward.", ge=1)
    synchronize_checkpoint_boundary: bool = key(
        False, "Synchronize the device at the boundaries of each region."
    )
    profile: bool = key(False, "Time forward and backward of each region.")
    memory_budget: Float | None = key(
        None,
        "Budget for what the repeated blocks keep for backward, without changes to the model: up to 1, a fraction of "
        "keeping everything; above 1, bytes. The rest is recomputed with the fewest FLOPs. Not in release 0.19.",
        gt=0,
    )


def __getattr__(name: str) -> Any:
    """Return a constant of the section: `ACT_CHKPT_PROFILE` is the spelling of a key, `ACT_CHKPT_PROFILE_DEFAULT` its
    default, `ACT_CHKPT_DEFAULT` all defaults."""
    if name == "ACT_CHKPT_DEFAULT":
        return DeepSpeedActivationCheckpointingConfig().model_dump()
    return constant_of(name, {"ACT_CHKPT": DeepSpeedActivationCheckpointingConfig})


# The `compile` section (DeepCompile).


class CompileConfig(DeepSpeedConfigModel):
    """Graph passes over the compiled module. `engine.compile()` alone needs nothing here."""

    deepcompile: bool = key(False, "Use the graph passes.")
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = key(
        None, "Checked against the ZeRO stage, which decides the passes."
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
    keep_int_input_tensors: bool = key(True, "No effect: autograd already keeps what backward needs.")
    keep_all_input_tensors: bool = key(False, "Keep all inputs of the graph alive until backward.")


# The `sparse_attention` section: block-sparse attention patterns.


class SparseAttentionConfig(LenientConfigModel):
    """Blocks of attention that are computed, in models whose attention is chosen by name; others read the section."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = key("fixed", "The pattern.")
    block: Int = key(16, "Number of rows and columns of a block.", ge=1)
    different_layout_per_head: bool = key(False, "Give every head its own pattern.")
    num_local_blocks: Int = key(4, "Blocks in a local window (fixed).", ge=0)
    num_global_blocks: Int = key(1, "Blocks that attend to everything (fixed, bigbird).", ge=0)
    attention: Literal["unidirectional", "bidirectional"] = key(
        "bidirectional", "Whether tokens attend to later tokens."
    )
    horizontal_global_attention: bool = key(False, "Global blocks also attend to everything (bidirectional).")
    num_different_global_patterns: Int = key(
        1, "Number of different global patterns across the heads (fixed).", ge=1
    )
    num_random_blocks: Int = key(0, "Random blocks per row (variable, bigbird).", ge=0)
    local_window_blocks: list[Int] = key([4], "Sizes of the local windows (variable).")
    global_block_indices: list[Int] = key([0], "First blocks of the global ranges (variable, bslongformer).")
    global_block_end_indices: list[Int] | None = key(
        None, "Ends of the global ranges (variable, bslongformer)."
    )
    num_sliding_window_blocks: Int = key(3, "Blocks in the sliding window (bigbird, bslongformer).", ge=0)


# The `tiled_compute` section: long sequences in tiles, on unchanged models.


class TiledComputeConfig(LenientConfigModel):
    """Compute feed-forward layers and the loss in tiles of the sequence, each again in backward."""

    enabled: bool = key(False, "Apply the techniques below to the model.")
    mlp: bool = key(True, "Compute feed-forward layers in tiles.")
    loss: bool = key(
        True, "Compute logits and cross-entropy in tiles; full logits exist only if they are read."
    )
    mlp_shards: Int | None = key(
        None, "Tiles of a feed-forward layer; null: sequence length / hidden size.", ge=1
    )
    loss_shards: Int | None = key(None, "Tiles of the loss; null: vocabulary size / hidden size.", ge=1)
    attention_chunk: Int | None = key(
        None,
        "Tokens per chunk of causal self-attention, with the other chunks in host memory; null: not chunked.",
        ge=1,
    )


# The `hybrid_engine` section.


class HybridEngineConfig(DeepSpeedConfigModel):
    """One engine that trains and generates (RLHF)."""

    enabled: bool = key(False, "`initialize` returns the hybrid engine.")
    max_out_tokens: Int = key(512, "Longest sequence in generation.", ge=1)
    inference_tp_size: Int = key(1, "Ranks that share each layer while generating.", ge=1)
    release_inference_cache: bool = key(
        False, "Free the memory of the key-value cache after each `generate`."
    )
    pin_parameters: bool = key(
        True, "Keep the memory of split weights between calls of `generate` (`inference_tp_size`)."
    )
    tp_gather_partition_size: Int = key(8, "Layers gathered at a time when several ranks share them.", ge=1)
    enable_cuda_graph: bool = key(False, "No effect: forward passes are not captured as graphs.")
