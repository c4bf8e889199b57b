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
    "deepspeed.linear.config": "deepspeed.transforms.lora.config",
    "deepspeed.linear.context_manager": "deepspeed.transforms.lora.context",
    "deepspeed.module_inject": "deepspeed.compat.module_inject",
    "deepspeed.module_inject.autotp_config": "deepspeed.parallel.tensor.planning.autotp_config",
    "deepspeed.module_inject.tp_plan_converter": "deepspeed.parallel.tensor.planning.tp_plan_converter",
    "deepspeed.moe": "deepspeed.parallel.expert",
    "deepspeed.monitor": "deepspeed.observe.monitor",
    "deepspeed.monitor.config": "deepspeed.config.sections.monitor",
    "deepspeed.nebula.config": "deepspeed.config.sections.checkpoint",
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
    "deepspeed.runtime.comm.nccl": "deepspeed.compat.runtime_comm.nccl",
    "deepspeed.runtime.compiler": "deepspeed.base.compiler",
    "deepspeed.runtime.config": "deepspeed.config.deepspeed_config",
    "deepspeed.runtime.config_utils": "deepspeed.config.section",
    "deepspeed.runtime.constants": "deepspeed.config.constants",
    "deepspeed.runtime.data_pipeline": "deepspeed.data",
    "deepspeed.runtime.data_pipeline.constants": "deepspeed.compat.data_constants",
    "deepspeed.runtime.data_pipeline.config": "deepspeed.config.sections.data",
    "deepspeed.runtime.dataloader": "deepspeed.data.loader",
    "deepspeed.runtime.domino": "deepspeed.parallel.tensor.domino",
    "deepspeed.runtime.eigenvalue": "deepspeed.compression.eigenvalue",
    "deepspeed.runtime.engine": "deepspeed.engine.engine",
    "deepspeed.runtime.fp16": "deepspeed.compat.fp16",
    "deepspeed.runtime.fp16.onebit": "deepspeed.optim.onebit",
    "deepspeed.runtime.hybrid_engine": "deepspeed.engine.hybrid_engine",
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
    "deepspeed.runtime.superoffload.superoffload_stage3": "deepspeed.zero.offload.superoffload_optimizer",
    "deepspeed.runtime.swap_tensor": "deepspeed.compat.swap_tensor",
    "deepspeed.runtime.tensor_parallel": "deepspeed.parallel.tensor",
    "deepspeed.runtime.tensor_parallel.config": "deepspeed.config.sections.tensor",
    "deepspeed.runtime.torch_autocast": "deepspeed.compat.torch_autocast",
    "deepspeed.runtime.utils": "deepspeed.compat.runtime_utils",
    "deepspeed.runtime.zenflow": "deepspeed.compat.zenflow",
    "deepspeed.runtime.zenflow.engine": "deepspeed.engine.zenflow",
    "deepspeed.runtime.zenflow.zenflow_config": "deepspeed.config.sections.zero",
    "deepspeed.runtime.zenflow.zenflow_stage_1_and_2": "deepspeed.zero.offload.zenflow_optimizer",
    "deepspeed.runtime.zero": "deepspeed.zero",
    "deepspeed.runtime.zero.config": "deepspeed.config.sections.zero",
    "deepspeed.runtime.zero.leaf_module_config": "deepspeed.config.sections.zero",
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
    "deepspeed.utils.tensor_fragment": "deepspeed.zero.tensor_fragment",
    "deepspeed.utils.timer": "deepspeed.observe.timer",
    "deepspeed.utils.torch": "deepspeed.base.torch",
    "deepspeed.utils.tp_shard": "deepspeed.compat.module_inject.tp_shard",
    "deepspeed.utils.types": "deepspeed.compat.types",
    "deepspeed.utils.z3_leaf_module": "deepspeed.zero.gathering.leaf_modules",
    "deepspeed.utils.zero_to_fp32": "deepspeed.tools.zero_to_fp32",
    "deepspeed.zero.config": "deepspeed.config.sections.zero",
    "deepspeed.zero.leaf_module_config": "deepspeed.config.sections.zero",
    "deepspeed.zero.linear": "deepspeed.compat.zero_linear",
    "deepspeed.zero.offload_config": "deepspeed.config.sections.offload",
    "deepspeed.zero.offload_states": "deepspeed.compat.offload_states",
    "deepspeed.zero.partition_parameters": "deepspeed.zero.gathering.init_context",
    "deepspeed.zero.stage3": "deepspeed.zero.optimizer",
    "deepspeed.zero.stage_1_and_2": "deepspeed.zero.optimizer",
    "deepspeed.zero.tiling": "deepspeed.transforms.tiled_linear",
    "deepspeed.zero.utils": "deepspeed.compat.zero_utils",
}

# Documented module -> {documented name: "our.module", or "our.module:name" where the name differs}.
# The documented module may be one of ours or exist only here.
NAMES: dict[str, dict[str, str]] = {
    "deepspeed.autotuning": {
        "Autotuner": "deepspeed.tools.autotuning.autotuner",
    },
    "deepspeed.checkpoint": {
        **dict.fromkeys(
            """
            BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP BUFFER_NAMES CLIP_GRAD DS_VERSION FP32_FLAT_GROUPS
            FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES GROUP_PADDINGS LOSS_SCALER OPTIMIZER_STATE_DICT
            ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM PARAMETER_TO_AVERAGE_PATTERNS
            PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS
            PARAM_SHAPES PARAM_SLICE_MAPPINGS PARTITION_COUNT PIPELINE_REPLICATED_PARAMETER_PATTERNS
            SINGLE_PARTITION_OF_FP32_GROUPS TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO
            UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS
            ZERO_STAGE
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
        "model_3d_desc": "deepspeed.compat.checkpoint.reshape_3d_utils",
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
    "deepspeed.inference.v2.ragged": {
        "DSStateManagerConfig": "deepspeed.inference.v2.ragged.manager_configs",
    },
    "deepspeed.module_inject": {
        "replace_transformer_layer": "deepspeed.compat.module_inject.replacing",
    },
    "deepspeed.module_inject.auto_ep_config": {
        "AutoEPConfig": "deepspeed.config.sections.expert",
        "parse_autoep_config": "deepspeed.config.sections.expert",
        "validate_autoep_config": "deepspeed.config.sections.expert",
    },
    "deepspeed.module_inject.auto_tp": dict.fromkeys(
        ("AutoTPConfig", "PartitionType", "TPLayerSpec"),
        "deepspeed.parallel.tensor.planning.autotp_config",
    ),
    "deepspeed.module_inject.containers": {
        "HFGPT2LayerPolicy": "deepspeed.compat.module_inject.replace_policy",
    },
    "deepspeed.module_inject.containers.gpt2": {
        "HFGPT2LayerPolicy": "deepspeed.compat.module_inject.replace_policy",
    },
    "deepspeed.module_inject.replace_module": {
        "revert_transformer_layer": "deepspeed.compat.module_inject.inject:revert_layers",
        "replace_transformer_layer": "deepspeed.compat.module_inject.replacing",
    },
    "deepspeed.ops": {
        "DeepSpeedTransformerConfig": "deepspeed.ops.transformer.transformer",
        "DeepSpeedTransformerLayer": "deepspeed.ops.transformer.transformer",
    },
    "deepspeed.ops.op_builder.async_io": {
        "AsyncIOBuilder": "deepspeed.ops.op_builder",
    },
    "deepspeed.ops.op_builder.evoformer_attn": {
        "EvoformerAttnBuilder": "deepspeed.ops.op_builder",
    },
    "deepspeed.ops.op_builder.gds": {
        "GDSBuilder": "deepspeed.ops.op_builder",
    },
    "deepspeed.ops.triton_ops": {
        "swiglu": "deepspeed.ops.triton_ops.swiglu_triton",
    },
    "deepspeed.profiling.flops_profiler": {
        "FlopsProfiler": "deepspeed.observe.flops.profiler",
        "get_model_profile": "deepspeed.observe.flops.profiler",
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "_set_cuda_rng_state": "deepspeed.transforms.recompute.rng:set_device_state",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME": "deepspeed.transforms.recompute.rng:MODEL_PARALLEL_RNG",
        "detach_variable": "deepspeed.compat.runtime_utils",
    },
    "deepspeed.runtime": {
        "ZeROOptimizer": "deepspeed.optim.base",
    },
    "deepspeed.runtime.engine": {
        "MoE": "deepspeed.parallel.expert.layer",
        "autocast_if_enabled": "deepspeed.compat.torch_autocast",
    },
    "deepspeed.runtime.utils": {
        "bwc_tensor_model_parallel_rank": "deepspeed.comm.bwc",
        "graph_process": "deepspeed.compat.absent",
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
            BATCH_INPUT_TIMER PIPE_RECV_GRAD_TIMER PIPE_RECV_INPUT_TIMER PIPE_SEND_GRAD_TIMER
            PIPE_SEND_OUTPUT_TIMER TRAIN_BATCH_TIMER
            """.split(),
            "deepspeed.engine.pipeline.instructions",
        ),
        "DeepSpeedEngine": "deepspeed.engine.engine",
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
    "deepspeed.comm.mori": {
        "is_enabled": "deepspeed.compat.absent",
    },
    "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine": {
        "NebulaCheckpointEngine": "deepspeed.compat.absent",
    },
    "deepspeed.utils.tensor_fragment": {
        "fragment_address": "deepspeed.checkpoint.files.safe_types:FragmentAddress",
    },
    "deepspeed.utils.zero_to_fp32": {
        "parse_optim_states": "deepspeed.compat.absent",
    },
    "deepspeed.zero.gathering.init_context": {
        "CUDAQuantizer": "deepspeed.ops.formats.op_quantizer",
    },
    "deepspeed.zero.optimizer": {
        "estimate_zero2_model_states_mem_needs": "deepspeed.compat.zero_memory",
        "estimate_zero2_model_states_mem_needs_all_cold": "deepspeed.compat.zero_memory",
        "estimate_zero2_model_states_mem_needs_all_live": "deepspeed.compat.zero_memory",
        "estimate_zero3_model_states_mem_needs": "deepspeed.compat.zero_memory",
        "estimate_zero3_model_states_mem_needs_all_cold": "deepspeed.compat.zero_memory",
        "estimate_zero3_model_states_mem_needs_all_live": "deepspeed.compat.zero_memory",
        "unwrap_model_for_generation": "deepspeed.zero.gathering.gathered",
    },
    "deepspeed.sequence": {
        "InternVLFusionAdapter": "deepspeed.parallel.sequence.autosp_fusion",
        "LlavaFusionAdapter": "deepspeed.parallel.sequence.autosp_fusion",
        "Qwen2VLFusionAdapter": "deepspeed.parallel.sequence.autosp_fusion",
        "UlyssesSPViTAttention": "deepspeed.parallel.sequence.autosp_vit",
        "auto_wrap_model_for_sp": "deepspeed.parallel.sequence.auto_sp",
        "detect_model_sp_info": "deepspeed.parallel.sequence.autosp_detector",
    },
    "deepspeed.utils": {
        "RepeatingLoader": "deepspeed.data.loader",
        "get_caller_func": "deepspeed.comm.record",
        "DeprecatedException": "deepspeed.base.exceptions",
        **dict.fromkeys(
            """
            get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group
            get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group
            get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size
            initialize set_tensor_model_parallel_rank set_tensor_model_parallel_world_size
            """.split(),
            "deepspeed.comm.documented_groups",
        ),
        "OnDevice": "deepspeed.transforms.on_device",
        "get_numactl_cmd": "deepspeed.base.numa",
        "instrument_w_nvtx": "deepspeed.compat.utils.nvtx",
        **dict.fromkeys(
            """
            get_full_hp_grad get_full_hp_param safe_get_full_fp32_param safe_get_full_grad
            safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad
            safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
            safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
            safe_update_full_grad_vectorized set_full_hp_grad set_full_hp_param
            """.split(),
            "deepspeed.zero.tensor_fragment",
        ),
        **dict.fromkeys(
            """
            apply_zero_leaf_module_config get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules
            set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_parameter
            """.split(),
            "deepspeed.zero.gathering.leaf_modules",
        ),
        "fragment_address": "deepspeed.checkpoint.files.safe_types:FragmentAddress",
        "is_initialized": "deepspeed.comm",
        "link_hp_params": "deepspeed.compat.absent",
    },
}

NAMES["deepspeed.config.deepspeed_config"] = {
    "get_gradient_clipping": "deepspeed.config.getters",
    "get_log_level": "deepspeed.config.getters",
    **dict.fromkeys(("ADAM_W_MODE", "ADAM_W_MODE_DEFAULT", "TORCH_ADAM_PARAM"), "deepspeed.config.constants"),
}
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
    "deepspeed.utils": (
        "debug",
        "groups",
        "logging",
        "numa",
        "nvtx",
        "tensor_fragment",
        "timer",
        "zero_to_fp32",
    ),
}
