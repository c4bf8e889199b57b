"""Documented paths and names, and where they are here. Only `finder.py` reads these tables.

Most documented module paths are simply where our code is; only the others have a row.
"""

from __future__ import annotations

# Documented module -> ours: the import returns the same module object, so that a client that replaces a
# name inside it replaces the one we look up. Submodules follow: `deepspeed.zero.config` is
# `deepspeed.runtime.zero.config`.
MODULES = {
    "deepspeed.accelerator": "deepspeed.base.accelerator",
    "deepspeed.accelerator.real_accelerator": "deepspeed.base.accelerator.select",
    "deepspeed.autotuning": "deepspeed.tools.autotuning",
    "deepspeed.autotuning.config": "deepspeed.config.sections.autotuning",
    "deepspeed.checkpoint.deepspeed_checkpoint": "deepspeed.compat.checkpoint.deepspeed_checkpoint",
    "deepspeed.checkpoint.ds_to_universal": "deepspeed.tools.ds_to_universal",
    "deepspeed.checkpoint.reshape_3d_utils": "deepspeed.compat.checkpoint.reshape_3d_utils",
    "deepspeed.checkpoint.reshape_meg_2d": "deepspeed.compat.checkpoint.reshape_meg_2d",
    "deepspeed.checkpoint.reshape_utils": "deepspeed.compat.checkpoint.reshape_utils",
    "deepspeed.checkpoint.universal_checkpoint": "deepspeed.compat.checkpoint.universal_checkpoint",
    "deepspeed.checkpoint.utils": "deepspeed.compat.checkpoint.utils",
    "deepspeed.checkpoint.zero_checkpoint": "deepspeed.compat.checkpoint.zero_checkpoint",
    "deepspeed.checkpointing": "deepspeed.transforms.recompute.checkpointing",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.comm.config": "deepspeed.config.sections.comm",
    "deepspeed.compile": "deepspeed.transforms.compile",
    "deepspeed.compile.config": "deepspeed.config.sections.compile",
    "deepspeed.compression.config": "deepspeed.config.sections.compression",
    "deepspeed.compression.constants": "deepspeed.config.compression_constants",
    "deepspeed.constants": "deepspeed.base.constants",
    "deepspeed.elasticity": "deepspeed.tools.elastic",
    "deepspeed.elasticity.config": "deepspeed.config.sections.elasticity",
    "deepspeed.elasticity.elasticity": "deepspeed.config.elastic_batch",
    "deepspeed.env_report": "deepspeed.tools.env_report",
    "deepspeed.git_version_info": "deepspeed.compat.git_version_info",
    "deepspeed.inference.quantization": "deepspeed.transforms.weight_quantization",
    "deepspeed.io": "deepspeed.ops.io",
    "deepspeed.launcher": "deepspeed.tools.launcher",
    "deepspeed.launcher.multinode_runner": "deepspeed.tools.launcher.hosts.multinode_runner",
    "deepspeed.linear": "deepspeed.transforms.lora",
    "deepspeed.linear.config": "deepspeed.config.sections.linear",
    "deepspeed.linear.context_manager": "deepspeed.transforms.lora.context",
    "deepspeed.module_inject": "deepspeed.compat.module_inject",
    "deepspeed.module_inject.autotp_config": "deepspeed.parallel.tensor.planning.autotp_config",
    "deepspeed.module_inject.tp_plan_converter": "deepspeed.parallel.tensor.planning.tp_plan_converter",
    "deepspeed.moe": "deepspeed.parallel.expert",
    "deepspeed.monitor": "deepspeed.observe.monitor",
    "deepspeed.monitor.config": "deepspeed.config.sections.monitor",
    "deepspeed.nebula.config": "deepspeed.config.sections.nebula",
    "deepspeed.nvme": "deepspeed.tools.nvme",
    "deepspeed.pipe": "deepspeed.parallel.pipeline",
    "deepspeed.pipe.engine": "deepspeed.engine.pipeline.engine",
    "deepspeed.pipe.p2p": "deepspeed.parallel.pipeline.messages.p2p",
    "deepspeed.pipe.schedule": "deepspeed.parallel.pipeline.schedules.instructions",
    "deepspeed.pipe.topology": "deepspeed.comm.topology",
    "deepspeed.profiling.config": "deepspeed.config.sections.profiling",
    "deepspeed.profiling.flops_profiler": "deepspeed.observe.flops",
    "deepspeed.runtime.activation_checkpointing": "deepspeed.transforms.recompute",
    "deepspeed.runtime.activation_checkpointing.config": "deepspeed.config.sections.activation_checkpointing",
    "deepspeed.runtime.base_optimizer": "deepspeed.optim.base",
    "deepspeed.runtime.bf16_optimizer": "deepspeed.zero.optimizer",
    "deepspeed.runtime.checkpoint_engine": "deepspeed.checkpoint.storage",
    "deepspeed.runtime.comm.coalesced_collectives": "deepspeed.compat.runtime_comm.coalesced_collectives",
    "deepspeed.runtime.comm.compressed": "deepspeed.compat.runtime_comm.compressed",
    "deepspeed.runtime.comm.hccl": "deepspeed.compat.runtime_comm.hccl",
    "deepspeed.runtime.comm.nccl": "deepspeed.compat.runtime_comm.nccl",
    "deepspeed.runtime.compiler": "deepspeed.base.compiler",
    "deepspeed.runtime.config": "deepspeed.config.deepspeed_config",
    "deepspeed.runtime.config_utils": "deepspeed.config.section",
    "deepspeed.runtime.constants": "deepspeed.config.constants",
    "deepspeed.runtime.data_pipeline": "deepspeed.data",
    "deepspeed.runtime.data_pipeline.config": "deepspeed.config.sections.data",
    "deepspeed.runtime.dataloader": "deepspeed.data.loader",
    "deepspeed.runtime.domino": "deepspeed.parallel.tensor.domino",
    "deepspeed.runtime.eigenvalue": "deepspeed.compression.eigenvalue",
    "deepspeed.runtime.engine": "deepspeed.engine.engine",
    "deepspeed.runtime.fp16": "deepspeed.compat.fp16",
    "deepspeed.runtime.fp16.onebit": "deepspeed.optim.onebit",
    "deepspeed.runtime.hybrid_engine": "deepspeed.engine.hybrid_engine",
    "deepspeed.runtime.hybrid_engine_graph": "deepspeed.engine.hybrid_engine_graph",
    "deepspeed.runtime.lr_schedules": "deepspeed.optim.lr_schedules",
    "deepspeed.runtime.model_checkpointing.constants": "deepspeed.config.sections.checkpoint",
    "deepspeed.runtime.pipe": "deepspeed.parallel.pipeline",
    "deepspeed.runtime.pipe.engine": "deepspeed.engine.pipeline.engine",
    "deepspeed.runtime.pipe.p2p": "deepspeed.parallel.pipeline.messages.p2p",
    "deepspeed.runtime.pipe.schedule": "deepspeed.parallel.pipeline.schedules.instructions",
    "deepspeed.runtime.pipe.topology": "deepspeed.comm.topology",
    "deepspeed.runtime.precision_config": "deepspeed.config.sections.precision",
    "deepspeed.runtime.progressive_layer_drop": "deepspeed.transforms.progressive_layer_drop",
    "deepspeed.runtime.quantize": "deepspeed.compression.moq",
    "deepspeed.runtime.rollout": "deepspeed.engine.rollout",
    "deepspeed.runtime.sequence_parallel": "deepspeed.parallel.sequence.hf",
    "deepspeed.runtime.sparse_tensor": "deepspeed.comm.sparse_tensor",
    "deepspeed.runtime.state_dict_factory": "deepspeed.checkpoint.foreign.megatron",
    "deepspeed.runtime.superoffload": "deepspeed.compat.superoffload",
    "deepspeed.runtime.superoffload.superoffload_stage3": "deepspeed.zero.offload.superoffload_optimizer",
    "deepspeed.runtime.swap_tensor": "deepspeed.compat.swap_tensor",
    "deepspeed.runtime.tensor_parallel": "deepspeed.parallel.tensor",
    "deepspeed.runtime.tensor_parallel.config": "deepspeed.config.sections.tensor",
    "deepspeed.runtime.torch_autocast": "deepspeed.compat.torch_autocast",
    "deepspeed.runtime.utils": "deepspeed.compat.runtime_utils",
    "deepspeed.runtime.weight_quantizer": "deepspeed.compat.weight_quantizer",
    "deepspeed.runtime.zenflow": "deepspeed.compat.zenflow",
    "deepspeed.runtime.zenflow.engine": "deepspeed.engine.zenflow",
    "deepspeed.runtime.zenflow.zenflow_config": "deepspeed.config.sections.zenflow",
    "deepspeed.runtime.zenflow.zenflow_stage_1_and_2": "deepspeed.zero.offload.zenflow_optimizer",
    "deepspeed.runtime.zero": "deepspeed.zero",
    "deepspeed.runtime.zero.config": "deepspeed.config.sections.zero",
    "deepspeed.runtime.zero.leaf_module_config": "deepspeed.config.sections.leaf_module",
    "deepspeed.runtime.zero.linear": "deepspeed.compat.zero_linear",
    "deepspeed.runtime.zero.offload_config": "deepspeed.config.sections.offload",
    "deepspeed.runtime.zero.offload_states": "deepspeed.compat.offload_states",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed.zero.gathering.init_context",
    "deepspeed.runtime.zero.stage3": "deepspeed.zero.optimizer",
    "deepspeed.runtime.zero.stage_1_and_2": "deepspeed.zero.optimizer",
    "deepspeed.runtime.zero.tensor_fragment": "deepspeed.zero.tensor_fragment",
    "deepspeed.runtime.zero.tiling": "deepspeed.transforms.tiled_linear",
    "deepspeed.runtime.zero.utils": "deepspeed.compat.zero_utils",
    "deepspeed.sequence": "deepspeed.parallel.sequence",
    "deepspeed.utils": "deepspeed.compat.utils",
    "deepspeed.utils.bwc": "deepspeed.comm.bwc",
    "deepspeed.utils.comms_logging": "deepspeed.comm.record",
    "deepspeed.utils.debug": "deepspeed.compat.utils.debug",
    "deepspeed.utils.exceptions": "deepspeed.base.exceptions",
    "deepspeed.utils.groups": "deepspeed.comm.documented_groups",
    "deepspeed.utils.init_on_device": "deepspeed.transforms.on_device",
    "deepspeed.utils.logging": "deepspeed.base.logging",
    "deepspeed.utils.numa": "deepspeed.base.numa",
    "deepspeed.utils.nvtx": "deepspeed.compat.utils.nvtx",
    "deepspeed.utils.pin_memory_tracker": "deepspeed.base.accelerator.pin_memory_tracker",
    "deepspeed.utils.static_cache": "deepspeed.inference.static_cache",
    "deepspeed.utils.tensor_fragment": "deepspeed.zero.tensor_fragment",
    "deepspeed.utils.timer": "deepspeed.observe.timer",
    "deepspeed.utils.torch": "deepspeed.base.torch",
    "deepspeed.utils.tp_shard": "deepspeed.compat.module_inject.tp_shard",
    "deepspeed.utils.types": "deepspeed.base.types",
    "deepspeed.utils.z3_leaf_module": "deepspeed.zero.gathering.leaf_modules",
    "deepspeed.utils.zero_to_fp32": "deepspeed.tools.zero_to_fp32",
    "deepspeed.zero.config": "deepspeed.config.sections.zero",
    "deepspeed.zero.leaf_module_config": "deepspeed.config.sections.leaf_module",
    "deepspeed.zero.linear": "deepspeed.compat.zero_linear",
    "deepspeed.zero.offload_config": "deepspeed.config.sections.offload",
    "deepspeed.zero.offload_states": "deepspeed.compat.offload_states",
    "deepspeed.zero.partition_parameters": "deepspeed.zero.gathering.init_context",
    "deepspeed.zero.stage3": "deepspeed.zero.optimizer",
    "deepspeed.zero.stage_1_and_2": "deepspeed.zero.optimizer",
    "deepspeed.zero.tiling": "deepspeed.transforms.tiled_linear",
    "deepspeed.zero.utils": "deepspeed.compat.zero_utils",
}

# Modules of `deepspeed.module_inject.containers` -> the policies found there.
_POLICIES = {
    "bert": ("HFBertLayerPolicy",),
    "bloom": ("BLOOMLayerPolicy",),
    "clip": ("HFCLIPLayerPolicy",),
    "distil_bert": ("HFDistilBertLayerPolicy",),
    "gpt2": ("HFGPT2LayerPolicy",),
    "gptj": ("HFGPTJLayerPolicy",),
    "gptneo": ("HFGPTNEOLayerPolicy",),
    "gptneox": ("GPTNEOXLayerPolicy",),
    "internlm": ("InternLMLayerPolicy",),
    "llama": ("LLAMALayerPolicy",),
    "llama2": ("LLAMA2LayerPolicy",),
    "megatron_gpt": ("MegatronLayerPolicy",),
    "megatron_gpt_moe": ("MegatronMoELayerPolicy",),
    "opt": ("HFOPTLayerPolicy",),
    "unet": ("UNetPolicy",),
    "vae": ("VAEPolicy",),
}

# Modules below `deepspeed.inference.v2.modules` -> what is found there; ours is in the package above.
_PARTS = {
    "configs.attention_configs": "DSSelfAttentionConfig MaskingType PositionalEmbeddingType RotateHalfConfig",
    "configs.embedding_config": "DSEmbeddingsConfig",
    "configs.linear_config": "DSLinearConfig",
    "configs.moe_config": "DSMoEConfig",
    "configs.norm_config": "DSNormConfig NormTypeEnum",
    "configs.unembed_config": "DSUnembedConfig",
    "implementations.linear": "BlasFPLinear",
    "implementations.linear.blas_fp_linear": "BlasFPLinear",
    "implementations.moe": "DSMultiGemmMoE",
    "implementations.moe.cutlass_multi_gemm": "DSMultiGemmMoE",
    "implementations.post_norm": "DSPostLNCUDAModule",
    "implementations.post_norm.cuda_post_ln": "DSPostLNCUDAModule",
    "implementations.pre_norm.cuda_pre_ln": "DSPreLNCUDAModule",
    "implementations.pre_norm.cuda_pre_rms": "DSPreRMSCUDAModule",
    "implementations.pre_norm": "DSPreLNCUDAModule DSPreRMSCUDAModule",
    "interfaces.attention_base": "DSSelfAttentionBase DSSelfAttentionRegistry",
    "interfaces.embedding_base": "DSEmbeddingBase DSEmbeddingRegistry",
    "interfaces.linear_base": "DSLinearBase DSLinearRegistry",
    "interfaces.moe_base": "DSMoEBase DSMoERegistry",
    "interfaces.post_norm_base": "DSPostNormBase DSPostNormRegistry",
    "interfaces.pre_norm_base": "DSPreNormBase DSPreNormRegistry",
    "interfaces.unembed_base": "DSUnembedBase DSUnembedRegistry",
}

# The same below `deepspeed.inference.v2.model_implementations`.
_WEIGHTS = {
    "common_parameters.attn_output_parameters": "AttentionOutputParameter",
    "common_parameters.embedding_parameters": "EmbeddingParameter",
    "common_parameters.invfreq_parameters": "InvFreqParameter",
    "common_parameters.mlp_parameters": (
        "FusedGatedMLPParameter GatedMLPParameter MLP1Parameter MLP2Parameter"
    ),
    "common_parameters.moe_parameters": (
        "MoEGatingWeightParameter UnfusedMoEGatedMLPParameter UnfusedMoEMLP1Parameter UnfusedMoEMLP2Parameter"
    ),
    "common_parameters.norm_parameters": "NormParameter",
    "common_parameters.qkv_parameters": (
        "FusedQKVParameter GQAMegatronQKVParameter MegatronQKVParameter UnfusedQKVParameter "
        "megatron_qkv_reshape transform_gqa_megatron"
    ),
    "common_parameters.unembed_parameters": "UnembedParameter",
    "sharding.attn": "get_local_heads",
    "sharding.attn_out": "attn_out_in_features shard_attn_out_param",
    "sharding.embedding": "shard_embedding_param sharded_embedding_dim",
    "sharding.mlp": "shard_mlp_1_param shard_mlp_2_param sharded_intermediate_dim",
    "sharding.qkv": "qkv_out_features shard_qkv_param",
    "sharding.types": "DEFAULT_SHARD_GRANULARITY ShardingType",
    "sharding.unembed": "shard_unembed_param sharded_unembed_dim",
    "sharding.utils": "get_shard_endpoints shard_param",
}

# Documented module -> {documented name: "our.module", or "our.module:name" where the name differs}.
# The documented module may be one of ours or exist only here.
NAMES: dict[str, dict[str, str]] = {
    "deepspeed.runtime.zenflow.zenflow_stage_1_and_2": {
        "_num_selected_columns": "deepspeed.zero.offload.columns:number_chosen",
    },
    "deepspeed.autotuning": {
        "Autotuner": "deepspeed.tools.autotuning.autotuner",
    },
    "deepspeed.autotuning.tuner": {
        "GridSearchTuner": "deepspeed.tools.autotuning.tuner.index_based_tuner",
        "ModelBasedTuner": "deepspeed.tools.autotuning.tuner.model_based_tuner",
        "RandomTuner": "deepspeed.tools.autotuning.tuner.index_based_tuner",
    },
    "deepspeed.checkpoint": {
        **dict.fromkeys(
            """
            BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP BF16_ZERO_FILE_PREFIX BUFFER_NAMES CAT_DIM
            CHECKPOINT_PARALLEL_DIMS CHECKPOINT_PP_DEGREE CHECKPOINT_TP_DEGREE CLIP_GRAD DS_VERSION
            FP16_ZERO_FILE_PREFIX FP32_FLAT_GROUPS FP32_GROUPS FP32_WEIGHT_KEY FROZEN_PARAM_FRAGMENTS
            FROZEN_PARAM_SHAPES GROUP_PADDINGS LAYER_FILE_PREFIX LOSS_SCALER MODEL_FILE_PREFIX
            MODEL_FILE_SUFFIX OPTIMIZER_STATE_DICT OPTIM_FILE_SUFFIX ORIGINAL_VOCAB_SIZE
            PADDED_VOCAB_SIZE PARAM PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
            PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS PARAM_ALIGNMENT_PADDINGS
            PARAM_GROUPS PARAM_N_SUB_PARAMS PARAM_SHAPES PARAM_SLICE_MAPPINGS PARTITION_COUNT
            PIPELINE_REPLICATED_PARAMETER_PATTERNS SINGLE_PARTITION_OF_FP32_GROUPS SUB_PARAMS_SHAPE
            SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS TP_REPLICATED_PARAMETER_PATTERNS
            UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY
            UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS VOCAB_TENSOR
            ZERO_FILE_PREFIX ZERO_STAGE
            """.split(),
            "deepspeed.checkpoint.constants",
        ),
        "DeepSpeedCheckpoint": "deepspeed.compat.checkpoint.deepspeed_checkpoint",
        "SubparamShape": "deepspeed.compat.checkpoint.universal_checkpoint",
        "enable_universal_checkpoint": "deepspeed.compat.checkpoint.universal_checkpoint",
        "ZeROCheckpoint": "deepspeed.compat.checkpoint.zero_checkpoint",
        "get_layer_ckpt_name_for_rank": "deepspeed.compat.checkpoint.utils",
        "get_model_3d_descriptor": "deepspeed.compat.checkpoint.reshape_3d_utils",
        "get_model_ckpt_name_for_rank": "deepspeed.compat.checkpoint.utils",
        "get_zero_ckpt_name_for_rank": "deepspeed.compat.checkpoint.utils",
        "merge_state": "deepspeed.compat.checkpoint.reshape_utils",
        "model_3d_desc": "deepspeed.compat.checkpoint.reshape_3d_utils",
        "reshape_meg_2d_parallel": "deepspeed.compat.checkpoint.reshape_meg_2d",
    },
    "deepspeed.compression": {
        "compression_scheduler": "deepspeed.compression.scheduler",
        "init_compression": "deepspeed.compression.compress",
        "redundancy_clean": "deepspeed.compression.compress",
    },
    # installed as the entry of `ds_check` by earlier builds
    "deepspeed.config_check": {
        "check_config": "deepspeed.tools.config.check",
        "main": "deepspeed.tools.config.command",
    },
    "deepspeed.elasticity": {
        "DSElasticAgent": "deepspeed.tools.elastic.elastic_agent",
        "compute_elastic_config": "deepspeed.config.elastic_batch",
        "elasticity_enabled": "deepspeed.config.elastic_batch",
        "ensure_immutable_elastic_config": "deepspeed.config.elastic_batch",
    },
    "deepspeed.inference": {
        "DeepSpeedTPConfig": "deepspeed.inference.v2.config_v2",
        "InferenceEngineV2": "deepspeed.inference.v2.engine_v2",
        "RaggedInferenceEngineConfig": "deepspeed.inference.v2.config_v2",
        "build_engine_from_ds_checkpoint": "deepspeed.inference.v2.engine_factory",
        "build_hf_engine": "deepspeed.inference.v2.engine_factory",
    },
    "deepspeed.inference.v2": {
        "DeepSpeedTPConfig": "deepspeed.inference.v2.config_v2",
        "InferenceEngineV2": "deepspeed.inference.v2.engine_v2",
        "RaggedInferenceEngineConfig": "deepspeed.inference.v2.config_v2",
        "build_engine_from_ds_checkpoint": "deepspeed.inference.v2.engine_factory",
        "build_hf_engine": "deepspeed.inference.v2.engine_factory",
    },
    "deepspeed.inference.v2.checkpoint": {
        "InMemoryModelEngine": "deepspeed.inference.v2.checkpoint.in_memory_engine",
        "CheckpointEngineBase": "deepspeed.inference.v2.checkpoint.base_engine",
        "HuggingFaceCheckpointEngine": "deepspeed.inference.v2.checkpoint.huggingface_engine",
    },
    **{
        f"deepspeed.inference.v2.model_implementations.{module}": dict.fromkeys(
            names.split(), f"deepspeed.inference.v2.model_implementations.{module.partition('.')[0]}"
        )
        for module, names in _WEIGHTS.items()
    },
    **{
        f"deepspeed.inference.v2.modules.{module}": dict.fromkeys(
            names.split(), f"deepspeed.inference.v2.modules.{module.partition('.')[0]}"
        )
        for module, names in _PARTS.items()
    },
    "deepspeed.inference.v2.modules.implementations": {
        "blas_fp_linear": "deepspeed.inference.v2.modules.implementations.linear",
        "cuda_post_ln": "deepspeed.inference.v2.modules.implementations.post_norm",
        "cuda_pre_ln": "deepspeed.inference.v2.modules.implementations.pre_norm",
        "cuda_pre_rms": "deepspeed.inference.v2.modules.implementations.pre_norm",
        "cutlass_multi_gemm": "deepspeed.inference.v2.modules.implementations.moe",
    },
    "deepspeed.inference.v2.ragged": {
        "DSStateManagerConfig": "deepspeed.inference.v2.ragged.manager_configs",
    },
    "deepspeed.model_implementations": {
        "DeepSpeedTransformerInference": "deepspeed.model_implementations.transformers.ds_transformer",
    },
    "deepspeed.module_inject": {
        "DSPolicy": "deepspeed.compat.module_inject.policy",
        "EmbeddingLayer": "deepspeed.compat.module_inject.layers",
        "GroupQuantizer": "deepspeed.compat.module_inject.replace_module",
        "HFBertLayerPolicy": "deepspeed.compat.module_inject.replace_policy",
        "Normalize": "deepspeed.compat.module_inject.layers",
        "ReplaceWithTensorSlicing": "deepspeed.compat.module_inject.tensor_slicing",
        "SubParamLinearAllreduce": "deepspeed.compat.module_inject.layers",
        "SubParamLinearLayer": "deepspeed.compat.module_inject.layers",
        "generic_injection": "deepspeed.compat.module_inject.replace_module",
        "quantize_transformer_layer": "deepspeed.compat.module_inject.module_quantize",
        "replace_transformer_layer": "deepspeed.compat.module_inject.replacing",
        "revert_transformer_layer": "deepspeed.compat.module_inject.replace_module",
        "set_autotp_mode": "deepspeed.compat.module_inject.layers",
    },
    "deepspeed.module_inject.auto_ep_config": {
        "AutoEPConfig": "deepspeed.config.sections.expert",
        "_UNSET": "deepspeed.config.sections.expert:ABSENT",
        "parse_autoep_config": "deepspeed.config.sections.expert",
        "validate_autoep_config": "deepspeed.config.sections.expert",
    },
    "deepspeed.module_inject.auto_ep_presets.base": {
        "AutoEPConfig": "deepspeed.config.sections.expert",
        "_UNSET": "deepspeed.config.sections.expert:ABSENT",
    },
    "deepspeed.module_inject.auto_tp": dict.fromkeys(
        ("AutoTPConfig", "AutoTPPresets", "PartitionType", "TPLayerSpec", "merge_autotp_configs"),
        "deepspeed.parallel.tensor.planning.autotp_config",
    ),
    "deepspeed.module_inject.containers": dict.fromkeys(
        (name for names in _POLICIES.values() for name in names),
        "deepspeed.compat.module_inject.replace_policy",
    ),
    **{
        f"deepspeed.module_inject.containers.{module}": dict.fromkeys(
            names, "deepspeed.compat.module_inject.replace_policy"
        )
        for module, names in _POLICIES.items()
    },
    "deepspeed.module_inject.replace_module": {
        "replace_transformer_layer": "deepspeed.compat.module_inject.replacing",
    },
    "deepspeed.ops": {
        "DeepSpeedTransformerConfig": "deepspeed.ops.transformer.transformer",
        "DeepSpeedTransformerLayer": "deepspeed.ops.transformer.transformer",
    },
    "deepspeed.ops.adam": {
        "ZenFlowCPUAdam": "deepspeed.ops.adam.zenflow_cpu_adam",
        "ZenFlowSelectiveAdamW": "deepspeed.ops.adam.zenflow_torch_adam",
    },
    "deepspeed.ops.transformer.inference": {
        "DeepSpeedTransformerInference": "deepspeed.model_implementations.transformers.ds_transformer",
    },
    "deepspeed.ops.transformer.inference.op_binding": {
        "GELUGemmOp": "deepspeed.ops.transformer.inference.op_binding.gelu_gemm",
        "LinearOp": "deepspeed.ops.transformer.inference.op_binding.linear",
        "MLPGemmOp": "deepspeed.ops.transformer.inference.op_binding.mlp_gemm",
        "QKVGemmOp": "deepspeed.ops.transformer.inference.op_binding.qkv_gemm",
        "ResidualAddOp": "deepspeed.ops.transformer.inference.op_binding.residual_add",
        "SoftmaxContextOp": "deepspeed.ops.transformer.inference.op_binding.softmax_context",
        "SoftmaxOp": "deepspeed.ops.transformer.inference.op_binding.softmax",
        "VectorMatMulOp": "deepspeed.ops.transformer.inference.op_binding.vector_matmul",
    },
    "deepspeed.ops.quantizer": {
        "ds_quantizer": "deepspeed.ops.quantizer.quantizer",
    },
    "deepspeed.ops.random_ltd": dict.fromkeys(
        ("GatherTokens", "ScatterTokens", "bert_sample_tokens", "gpt_sample_tokens"),
        "deepspeed.ops.random_ltd.dropping_utils",
    ),
    "deepspeed.ops.triton_ops": {
        "swiglu": "deepspeed.ops.triton_ops.swiglu_triton",
    },
    "deepspeed.ops.transformer": {
        "DeepSpeedInferenceConfig": "deepspeed.ops.transformer.inference.config",
        "DeepSpeedMoEInference": "deepspeed.ops.transformer.inference.moe_inference",
        "DeepSpeedMoEInferenceConfig": "deepspeed.ops.transformer.inference.moe_inference",
    },
    "deepspeed.profiling.flops_profiler": {
        "FlopsProfiler": "deepspeed.observe.flops.profiler",
        "get_model_profile": "deepspeed.observe.flops.profiler",
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "_set_cuda_rng_state": "deepspeed.transforms.recompute.rng:set_device_state",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME": "deepspeed.transforms.recompute.rng:MODEL_PARALLEL_RNG",
        "detach_variable": "deepspeed.compat.helpers.tensor_structures",
        "extract_tensors": "deepspeed.compat.helpers.tensor_structures",
        "merge_tensors": "deepspeed.compat.helpers.tensor_structures",
    },
    "deepspeed.runtime": {
        "ZeROOptimizer": "deepspeed.optim.base",
    },
    "deepspeed.runtime.engine": {
        "MoE": "deepspeed.parallel.expert.layer",
        "autocast_if_enabled": "deepspeed.compat.torch_autocast",
        "split_half_float_double_sparse": "deepspeed.compat.helpers.tensor_structures",
    },
    "deepspeed.runtime.utils": {
        "bwc_tensor_model_parallel_rank": "deepspeed.comm.bwc",
        "inf": "torch",
    },
    "deepspeed.runtime.pipe": {
        "DualPipeVModule": "deepspeed.engine.pipeline.dualpipev",
        "LayerSpec": "deepspeed.parallel.pipeline.module",
        "PipelineModule": "deepspeed.parallel.pipeline.module",
        "ProcessTopology": "deepspeed.comm.topology",
        "TiedLayerSpec": "deepspeed.parallel.pipeline.module",
        "cut_causal_lm": "deepspeed.parallel.pipeline.causal_lm",
    },
    "deepspeed.runtime.pipe.engine": {
        **dict.fromkeys(
            """
            BATCH_INPUT_TIMER EVAL_BATCH_TIMER PIPE_RECV_GRAD_TIMER PIPE_RECV_INPUT_TIMER PIPE_SEND_GRAD_TIMER
            PIPE_SEND_OUTPUT_TIMER TRAIN_BATCH_TIMER
            """.split(),
            "deepspeed.engine.pipeline.instructions",
        ),
        "DeepSpeedEngine": "deepspeed.engine.engine",
        "is_even": "deepspeed.parallel.pipeline.schedules.instructions:_is_even",
    },
    "deepspeed.runtime.zero": {
        "DeepSpeedTensorOverride": "deepspeed.zero.gathering.init_context",
        "DeepSpeedZeRoOffload": "deepspeed.zero.parameter_offload",
        "GatheredParameters": "deepspeed.zero.gathering.init_context",
        "Init": "deepspeed.zero.gathering.init_context",
        "MiCS_Init": "deepspeed.zero.mics",
        "TiledLinear": "deepspeed.transforms.tiled_linear",
        "TiledLinearReturnBias": "deepspeed.transforms.tiled_linear",
        "ZeroParamStatus": "deepspeed.zero.gathering.init_context",
        "ZeroParamType": "deepspeed.zero.gathering.init_context",
        "register_external_parameter": "deepspeed.zero.gathering.init_context",
        "unregister_external_parameter": "deepspeed.zero.gathering.init_context",
        "unwrap_model_for_generation": "deepspeed.zero.gathering.gathered",
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "AutogradComputeMLP": "deepspeed.parallel.sequence.tiled.functions",
        "SequenceTiledCompute": "deepspeed.parallel.sequence.tiled.functions",
        "TiledFusedLogitsLoss": "deepspeed.parallel.sequence.tiled.functions",
        "TiledLoss": "deepspeed.parallel.sequence.tiled.functions",
        "TiledMLP": "deepspeed.parallel.sequence.tiled.functions",
        "UlyssesSPAttentionHF": "deepspeed.parallel.sequence.hf.attention",
        "UlyssesSPDataLoaderAdapter": "deepspeed.parallel.sequence.hf.dataloader",
        "UlyssesSPFwdLossBwdWithLogits": "deepspeed.parallel.sequence.tiled.logits_training",
        "sequence_tiled_compute": "deepspeed.parallel.sequence.tiled.functions",
    },
    "deepspeed.accelerator.mps_accelerator": {
        "MPS_Accelerator": "deepspeed.base.accelerator.torch_device",
    },
    "deepspeed.zero.gathering.init_context": {
        "CUDAQuantizer": "deepspeed.ops.formats.op_quantizer",
    },
    "deepspeed.zero.optimizer": {
        "get_alignment_padding": "deepspeed.compat.helpers.tensor_structures",
        "lcm": "deepspeed.compat.helpers.tensor_structures",
        "move_to_cpu": "deepspeed.compat.helpers.tensor_structures",
        "split_half_float_double": "deepspeed.compat.helpers.tensor_structures",
        "estimate_zero2_model_states_mem_needs": "deepspeed.compat.zero_memory",
        "estimate_zero2_model_states_mem_needs_all_cold": "deepspeed.compat.zero_memory",
        "estimate_zero2_model_states_mem_needs_all_live": "deepspeed.compat.zero_memory",
        "estimate_zero3_model_states_mem_needs": "deepspeed.compat.zero_memory",
        "estimate_zero3_model_states_mem_needs_all_cold": "deepspeed.compat.zero_memory",
        "estimate_zero3_model_states_mem_needs_all_live": "deepspeed.compat.zero_memory",
        "unwrap_model_for_generation": "deepspeed.zero.gathering.gathered",
    },
    "deepspeed.runtime.checkpoint_engine": {
        "DataStatesCheckpointEngine": "deepspeed.checkpoint.storage.datastates_checkpoint_engine",
        "DecoupledCheckpointEngine": "deepspeed.checkpoint.storage.decoupled_checkpoint_engine",
        "FastCheckpointEngine": "deepspeed.checkpoint.storage.fast_checkpoint_engine",
        "create_checkpoint_engine": "deepspeed.checkpoint.storage.utils",
    },
    "deepspeed.runtime.tensor_parallel": {
        "AUTOTP_MODE": "deepspeed.config.sections.tensor",
        "TpTrainingManager": "deepspeed.runtime.tensor_parallel.tp_manager",
        "get_tensor_parallel_config": "deepspeed.config.sections.tensor",
    },
    "deepspeed.runtime.swap_tensor.aio_config": {
        "get_aio_config": "deepspeed.config.sections.aio",
    },
    "deepspeed.sequence": {
        "InternVLFusionAdapter": "deepspeed.parallel.sequence.autosp_fusion",
        "LlavaFusionAdapter": "deepspeed.parallel.sequence.autosp_fusion",
        "ModalityFusionSPAdapter": "deepspeed.parallel.sequence.autosp_fusion",
        "Qwen2VLFusionAdapter": "deepspeed.parallel.sequence.autosp_fusion",
        "SPModelInfo": "deepspeed.parallel.sequence.autosp_detector",
        "UlyssesSPViTAttention": "deepspeed.parallel.sequence.autosp_vit",
        "auto_wrap_model_for_sp": "deepspeed.parallel.sequence.auto_sp",
        "detect_model_sp_info": "deepspeed.parallel.sequence.autosp_detector",
    },
    "deepspeed.utils.pin_memory": dict.fromkeys(
        ("NativePinnedMemory", "get_active_native_pinned_memory", "get_native_pinned_memory"),
        "deepspeed.ops.aio.native_pins",
    ),
    "deepspeed.module_inject.layers": {
        "_build_param_uc_restore_meta": "deepspeed.parallel.tensor.described:description",
        "_get_param_uc_conversion_meta": "deepspeed.parallel.tensor.described:conversion_of",
    },
    "deepspeed.utils.config": {
        "get_timers_config": "deepspeed.config.sections.profiling",
    },
    "deepspeed.utils.groups": {
        "_init_tp_mesh_device": "deepspeed.parallel.tensor.ranks:init_tp_mesh_device",
    },
    "deepspeed.utils": {
        "RepeatingLoader": "deepspeed.data.loader",
        "fragment_address": "deepspeed.checkpoint.files.safe_types:FragmentAddress",
        "is_initialized": "deepspeed.comm",
        "lazy_init_hp_params_optimizer_state": "deepspeed.utils.mixed_precision_linkage",
        "link_hp_params": "deepspeed.utils.mixed_precision_linkage",
    },
}

# Functions that read one setting from a config dict.
_CONFIG_GETTERS = """
get_amp_enabled get_amp_params get_checkpoint_parallel_write_pipeline get_checkpoint_params
get_checkpoint_tag_validation_mode get_communication_data_type get_data_types_params
get_dataloader_drop_last get_disable_allgather get_disable_python_gc get_dump_state get_eigenvalue_config
get_eigenvalue_enabled get_eigenvalue_gas_boundary_resolution get_eigenvalue_layer_name
get_eigenvalue_layer_num get_eigenvalue_max_iter get_eigenvalue_stability get_eigenvalue_tol
get_eigenvalue_verbose get_expert_data_topo_config get_expert_parallel_config
get_gradient_accumulation_steps get_gradient_allreduce_op get_gradient_clipping
get_gradient_predivide_factor get_graph_harvesting get_hybrid_engine_config get_log_level
get_lower_precision_safe_modules get_managed_gradient_accumulation get_memory_breakdown
get_optimizer_gradient_clipping get_optimizer_legacy_fusion get_optimizer_name get_optimizer_params
get_pipeline_config get_pld_enabled get_pld_params get_prescale_gradients get_scheduler_name
get_scheduler_params get_sparse_attention get_sparse_attention_mode get_sparse_attention_type
get_sparse_bigbird_config get_sparse_bslongformer_config get_sparse_dense_config get_sparse_fixed_config
get_sparse_gradients_enabled get_sparse_variable_config get_steps_per_print get_torch_autocast_dtype
get_torch_autocast_enabled get_train_batch_size get_train_micro_batch_size_per_gpu
get_wall_clock_breakdown get_zero_allow_untested_optimizer get_zero_force_ds_cpu_optimizer
""".split()
NAMES["deepspeed.config.deepspeed_config"] = {
    **dict.fromkeys(_CONFIG_GETTERS, "deepspeed.config.getters"),
    **dict.fromkeys(("ADAM_W_MODE", "ADAM_W_MODE_DEFAULT", "TORCH_ADAM_PARAM"), "deepspeed.config.constants"),
}
NAMES["deepspeed.module_inject.containers.llama"]["_get_rope_theta"] = (
    "deepspeed.inference.model.rope:rope_theta_of_attention"
)

# Modules of `deepspeed.ops.op_builder` -> the builders found there.
_BUILDERS = {
    "async_io": "AsyncIOBuilder",
    "cpu.async_io": "AsyncIOBuilder",
    "cpu.comm": "CCLCommBuilder ShareMemCommBuilder",
    "cpu.cpu_adam": "CPUAdamBuilder",
    "cpu.fused_adam": "FusedAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "dc": "DeepCompileBuilder",
    "evoformer_attn": "EvoformerAttnBuilder",
    "fp_quantizer": "FPQuantizerBuilder",
    "fused_adam": "FusedAdamBuilder",
    "fused_lamb": "FusedLambBuilder",
    "fused_lion": "FusedLionBuilder",
    "gds": "GDSBuilder",
    "inference_core_ops": "InferenceCoreBuilder",
    "inference_cutlass_builder": "InferenceCutlassBuilder",
    "pin_memory": "PinMemoryBuilder",
    "quantizer": "QuantizerBuilder",
    "ragged_ops": "RaggedOpsBuilder",
    "ragged_utils": "RaggedUtilsBuilder",
    "random_ltd": "RandomLTDBuilder",
    "sparse_attn": "SparseAttnBuilder",
    "spatial_inference": "SpatialInferenceBuilder",
    "stochastic_transformer": "StochasticTransformerBuilder",
    "transformer": "TransformerBuilder",
    "transformer_inference": "InferenceBuilder",
    "utils": "UtilsBuilder",
}
NAMES.update(
    {
        f"deepspeed.ops.op_builder.{module}": dict.fromkeys(names.split(), "deepspeed.ops.op_builder")
        for module, names in _BUILDERS.items()
    }
)

# Packages of ours whose documented submodules clients reach by dotted access after only `import deepspeed`.
SUBMODULES = {
    "deepspeed.moe": ("layer", "utils"),
    "deepspeed.launcher": ("multinode_runner", "runner"),
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
