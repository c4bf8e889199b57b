"""Documented paths and names, and where they are here. Nothing but `finder.py` reads these tables.

Most documented module paths are simply where our code lives; only the others have a row.
"""

from __future__ import annotations

# Documented module -> ours: the import gives the very same module object, so that a client that replaces a
# name inside it replaces the one we look up. Submodules follow: `deepspeed.zero.config` is
# `deepspeed.runtime.zero.config`.
MODULES = {
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator.select",
    "deepspeed.checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.git_version_info": "deepspeed.version",
    "deepspeed.pipe": "deepspeed.runtime.pipe",
    "deepspeed.runtime.bf16_optimizer": "deepspeed.runtime.zero.optimizer",
    "deepspeed.runtime.fp16.fused_optimizer": "deepspeed.runtime.zero.optimizer",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed.runtime.zero.init_context",
    "deepspeed.runtime.zero.stage3": "deepspeed.runtime.zero.optimizer",
    "deepspeed.runtime.zero.stage_1_and_2": "deepspeed.runtime.zero.optimizer",
    "deepspeed.zero": "deepspeed.runtime.zero",
}

# Documented module -> {documented name: "our.module", or "our.module:name" where the name differs}.
# The documented module may be one of ours or exist only here.
NAMES: dict[str, dict[str, str]] = {
    "deepspeed.autotuning": {
        "Autotuner": "deepspeed.autotuning.autotuner",
    },
    "deepspeed.checkpoint": {
        "DeepSpeedCheckpoint": "deepspeed.checkpoint.deepspeed_checkpoint",
        "SubparamShape": "deepspeed.checkpoint.universal_checkpoint",
        "enable_universal_checkpoint": "deepspeed.checkpoint.universal_checkpoint",
    },
    "deepspeed.compression": {
        "init_compression": "deepspeed.compression.compress",
        "redundancy_clean": "deepspeed.compression.compress",
    },
    "deepspeed.elasticity": {
        "DSElasticAgent": "deepspeed.elasticity.elastic_agent",
        "compute_elastic_config": "deepspeed.elasticity.elasticity",
        "elasticity_enabled": "deepspeed.elasticity.elasticity",
        "ensure_immutable_elastic_config": "deepspeed.elasticity.elasticity",
    },
    "deepspeed.inference": {
        "DeepSpeedTPConfig": "deepspeed.inference.config",
        "InferenceEngineV2": "deepspeed.inference.v2.engine_v2",
        "RaggedInferenceEngineConfig": "deepspeed.inference.v2.config_v2",
        "build_engine_from_ds_checkpoint": "deepspeed.inference.v2.engine_factory",
        "build_hf_engine": "deepspeed.inference.v2.engine_factory",
    },
    "deepspeed.inference.v2.checkpoint": {
        "CheckpointEngineBase": "deepspeed.inference.v2.checkpoint.base_engine",
        "HuggingFaceCheckpointEngine": "deepspeed.inference.v2.checkpoint.huggingface_engine",
    },
    "deepspeed.inference.v2.engine_factory": {
        "HuggingFaceCheckpointEngine": "deepspeed.inference.v2.checkpoint.huggingface_engine",
    },
    "deepspeed.inference.v2.ragged": {
        "DSStateManagerConfig": "deepspeed.inference.v2.ragged.manager_configs",
    },
    "deepspeed.linear": {
        "Init": "deepspeed.linear.context_manager",
        "LoRAConfig": "deepspeed.linear.config",
        "OptimizedLinear": "deepspeed.linear.optimized_linear",
        "QuantizationConfig": "deepspeed.linear.config",
        "init_lora": "deepspeed.linear.context_manager",
    },
    "deepspeed.module_inject": {
        "AutoTPConfig": "deepspeed.module_inject.autotp_config",
        "AutoTPPresets": "deepspeed.module_inject.autotp_config",
        "DSPolicy": "deepspeed.module_inject.policy",
        "LinearAllreduce": "deepspeed.module_inject.layers",
        "LinearLayer": "deepspeed.module_inject.layers",
        "PartitionType": "deepspeed.module_inject.autotp_config",
        "TPLayerSpec": "deepspeed.module_inject.autotp_config",
        "merge_autotp_configs": "deepspeed.module_inject.autotp_config",
        "replace_transformer_layer": "deepspeed.module_inject.replace_module",
    },
    "deepspeed.ops.adam": {
        "ZenFlowCPUAdam": "deepspeed.ops.adam.zenflow_cpu_adam",
        "ZenFlowSelectiveAdamW": "deepspeed.ops.adam.zenflow_torch_adam",
    },
    "deepspeed.ops.sparse_attention": {
        "BSLongformerSparsityConfig": "deepspeed.ops.sparse_attention.sparsity_config",
        "BertSparseSelfAttention": "deepspeed.ops.sparse_attention.bert_sparse_self_attention",
        "BigBirdSparsityConfig": "deepspeed.ops.sparse_attention.sparsity_config",
        "DenseSparsityConfig": "deepspeed.ops.sparse_attention.sparsity_config",
        "FixedSparsityConfig": "deepspeed.ops.sparse_attention.sparsity_config",
        "LocalSlidingWindowSparsityConfig": "deepspeed.ops.sparse_attention.sparsity_config",
        "SparseAttentionUtils": "deepspeed.ops.sparse_attention.sparse_attention_utils",
        "SparseSelfAttention": "deepspeed.ops.sparse_attention.sparse_self_attention",
        "VariableSparsityConfig": "deepspeed.ops.sparse_attention.sparsity_config",
    },
    "deepspeed.runtime.pipe": {
        "LayerSpec": "deepspeed.runtime.pipe.module",
        "PipelineModule": "deepspeed.runtime.pipe.module",
        "ProcessTopology": "deepspeed.runtime.pipe.topology",
        "TiedLayerSpec": "deepspeed.runtime.pipe.module",
    },
    "deepspeed.runtime.zero": {
        "DeepSpeedTensorOverride": "deepspeed.runtime.zero.partition_parameters",
        "DeepSpeedZeRoOffload": "deepspeed.runtime.zero.parameter_offload",
        "GatheredParameters": "deepspeed.runtime.zero.partition_parameters",
        "Init": "deepspeed.runtime.zero.partition_parameters",
        "MiCS_Init": "deepspeed.runtime.zero.mics",
        "TiledLinear": "deepspeed.runtime.zero.tiling",
        "TiledLinearReturnBias": "deepspeed.runtime.zero.tiling",
        "ZeroParamStatus": "deepspeed.runtime.zero.partition_parameters",
        "ZeroParamType": "deepspeed.runtime.zero.partition_parameters",
        "register_external_parameter": "deepspeed.runtime.zero.partition_parameters",
        "unwrap_model_for_generation": "deepspeed.runtime.zero.gathered",
    },
    "deepspeed.runtime.zero.optimizer": {
        "estimate_zero2_model_states_mem_needs": "deepspeed.runtime.zero.memory",
        "estimate_zero2_model_states_mem_needs_all_cold": "deepspeed.runtime.zero.memory",
        "estimate_zero2_model_states_mem_needs_all_live": "deepspeed.runtime.zero.memory",
        "estimate_zero3_model_states_mem_needs": "deepspeed.runtime.zero.memory",
        "estimate_zero3_model_states_mem_needs_all_cold": "deepspeed.runtime.zero.memory",
        "estimate_zero3_model_states_mem_needs_all_live": "deepspeed.runtime.zero.memory",
        "unwrap_model_for_generation": "deepspeed.runtime.zero.gathered",
    },
    "deepspeed.runtime.zero.utils": {
        "ZeRORuntimeException": "deepspeed.runtime.zero.params",
        "is_zero_param": "deepspeed.runtime.zero.params",
    },
    "deepspeed.sequence": {
        "UlyssesSPViTAttention": "deepspeed.sequence.autosp_vit",
        "auto_wrap_model_for_sp": "deepspeed.sequence.auto_sp",
        "detect_model_sp_info": "deepspeed.sequence.autosp_detector",
    },
    "deepspeed.utils": {
        "RepeatingLoader": "deepspeed.runtime.dataloader",
        "is_initialized": "deepspeed.comm.comm",
        "lazy_init_hp_params_optimizer_state": "deepspeed.utils.mixed_precision_linkage",
        "link_hp_params": "deepspeed.utils.mixed_precision_linkage",
    },
}

# Packages of ours whose documented submodules clients reach by dotted access after `import deepspeed` alone.
SUBMODULES = {
    "deepspeed.moe": ("layer", "utils"),
    "deepspeed.ops": ("adagrad", "adam", "aio", "gds", "lamb", "lion", "op_builder"),
    "deepspeed.runtime": (
        "activation_checkpointing",
        "config",
        "config_utils",
        "constants",
        "dataloader",
        "engine",
        "lr_schedules",
        "pipe",
        "utils",
        "zero",
    ),
    "deepspeed.runtime.zero": ("config", "offload_config", "partition_parameters", "stage_1_and_2"),
    "deepspeed.utils": ("groups", "logging", "timer", "zero_to_fp32"),
}
