"""Documented paths and names, and their counterparts here. Only `finder.py` reads these tables.

Most documented module paths are also the paths of our modules; only the others have a row.
"""

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
    "deepspeed.checkpoint.reshape_meg_2d": "deepspeed.compat.checkpoint.reshape_3d_utils",
    "deepspeed.checkpoint.reshape_utils": "deepspeed.compat.checkpoint.reshape_utils",
    "deepspeed.checkpoint.universal_checkpoint": "deepspeed.compat.checkpoint.universal_checkpoint",
    "deepspeed.checkpoint.utils": "deepspeed.compat.checkpoint.utils",
    "deepspeed.checkpoint.zero_checkpoint": "deepspeed.compat.checkpoint.deepspeed_checkpoint",
    "deepspeed.checkpointing": "deepspeed.transforms.recompute.checkpointing",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.comm.config": "deepspeed.config.sections.comm",
    "deepspeed.compile": "deepspeed.transforms.compile",
    "deepspeed.compile.config": "deepspeed.config.sections.model",
    "deepspeed.compression.config": "deepspeed.config.sections.compression",
    "deepspeed.compression.constants": "deepspeed.config.compression_constants",
    "deepspeed.constants": "deepspeed.base.constants",
    "deepspeed.elasticity": "deepspeed.tools.elastic",
    "deepspeed.elasticity.config": "deepspeed.config.sections.elasticity",
    "deepspeed.elasticity.elasticity": "deepspeed.config.elastic_batch",
    "deepspeed.env_report": "deepspeed.tools.env_report",
    "deepspeed.git_version_info": "deepspeed.compat.git_version_info",
    "deepspeed.inference.quantization": "deepspeed.transforms.weight_quantization",
    "deepspeed.inference.quantization.layers": "deepspeed.transforms.weight_quantization.quantization",
    "deepspeed.inference.v2.checkpoint.base_engine": "deepspeed.inference.v2.checkpoint.huggingface_engine",
    "deepspeed.inference.v2.checkpoint.in_memory_engine": "deepspeed.inference.v2.checkpoint.huggingface_engine",
    "deepspeed.inference.v2.engine_factory": "deepspeed.inference.v2.engine_v2",
    "deepspeed.inference.v2.ragged.manager_configs": "deepspeed.inference.v2.config_v2",
    "deepspeed.inference.v2.scheduling_utils": "deepspeed.inference.v2.engine_v2",
    "deepspeed.io": "deepspeed.ops.io",
    "deepspeed.io.mock_file_writer": "deepspeed.ops.io.base_file_writer",
    "deepspeed.io.py_file_writer": "deepspeed.ops.io.base_file_writer",
    "deepspeed.launcher": "deepspeed.tools.launcher",
    "deepspeed.launcher.multinode_runner": "deepspeed.tools.launcher.hosts.multinode_runner",
    "deepspeed.linear": "deepspeed.transforms.lora",
    "deepspeed.linear.context_manager": "deepspeed.transforms.lora.context",
    "deepspeed.module_inject": "deepspeed.compat.module_inject",
    "deepspeed.module_inject.autotp_config": "deepspeed.parallel.tensor.planning.autotp_config",
    "deepspeed.module_inject.inject": "deepspeed.compat.module_inject.replacing",
    "deepspeed.module_inject.policy": "deepspeed.compat.module_inject.replace_policy",
    "deepspeed.module_inject.tp_plan_converter": "deepspeed.parallel.tensor.planning.rules",
    "deepspeed.moe": "deepspeed.parallel.expert",
    "deepspeed.moe.experts": "deepspeed.parallel.expert.layer",
    "deepspeed.moe.mappings": "deepspeed.parallel.expert.sharded_moe",
    "deepspeed.monitor": "deepspeed.observe.monitor",
    "deepspeed.monitor.config": "deepspeed.config.sections.monitor",
    "deepspeed.nebula.config": "deepspeed.config.sections.checkpoint",
    "deepspeed.nvme": "deepspeed.tools.nvme",
    "deepspeed.ops.lion.cpu_lion": "deepspeed.ops.lion.fused_lion",
    "deepspeed.profiling.config": "deepspeed.config.sections.profiling",
    "deepspeed.profiling.flops_profiler": "deepspeed.observe.flops",
    "deepspeed.runtime.activation_checkpointing": "deepspeed.transforms.recompute",
    "deepspeed.runtime.activation_checkpointing.config": "deepspeed.config.sections.model",
    "deepspeed.runtime.base_optimizer": "deepspeed.zero.optimizer",
    "deepspeed.runtime.bf16_optimizer": "deepspeed.zero.optimizer",
    "deepspeed.runtime.checkpoint_engine": "deepspeed.checkpoint.storage",
    "deepspeed.runtime.comm.coalesced_collectives": "deepspeed.compat.runtime_comm.coalesced_collectives",
    "deepspeed.runtime.comm.compressed": "deepspeed.compat.runtime_comm.compressed",
    "deepspeed.runtime.comm.nccl": "deepspeed.compat.runtime_comm.compressed",
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
    "deepspeed.runtime.fp16.unfused_optimizer": "deepspeed.compat.fp16.fused_optimizer",
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
    "deepspeed.runtime.tensor_parallel.config": "deepspeed.config.sections.parallel",
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
    "deepspeed.runtime.zero.muon.original_muon": "deepspeed.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.offload_config": "deepspeed.config.sections.offload",
    "deepspeed.runtime.zero.offload_states": "deepspeed.compat.offload_states",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed.zero.gathering.init_context",
    "deepspeed.runtime.zero.stage3": "deepspeed.zero.optimizer",
    "deepspeed.runtime.zero.stage_1_and_2": "deepspeed.zero.optimizer",
    "deepspeed.runtime.zero.tiling": "deepspeed.transforms.tiled_linear",
    "deepspeed.runtime.zero.utils": "deepspeed.compat.zero_utils",
    "deepspeed.sequence": "deepspeed.parallel.sequence",
    "deepspeed.utils": "deepspeed.compat.utils",
    "deepspeed.utils.bwc": "deepspeed.comm.documented_groups",
    "deepspeed.utils.comms_logging": "deepspeed.comm.record",
    "deepspeed.utils.exceptions": "deepspeed.base.exceptions",
    "deepspeed.utils.groups": "deepspeed.comm.documented_groups",
    "deepspeed.utils.init_on_device": "deepspeed.transforms.on_device",
    "deepspeed.utils.logging": "deepspeed.base.logging",
    "deepspeed.utils.numa": "deepspeed.base.numa",
    "deepspeed.utils.pin_memory_tracker": "deepspeed.base.accelerator.pin_memory_tracker",
    "deepspeed.utils.tensor_fragment": "deepspeed.zero.tensor_fragment",
    "deepspeed.utils.timer": "deepspeed.observe.timer",
    "deepspeed.utils.torch": "deepspeed.base.compiler",
    "deepspeed.utils.tp_shard": "deepspeed.compat.module_inject.tp_shard",
    "deepspeed.utils.types": "deepspeed.compat.types",
    "deepspeed.utils.z3_leaf_module": "deepspeed.zero.gathering.leaf_modules",
    "deepspeed.utils.zero_to_fp32": "deepspeed.tools.zero_to_fp32",
    "deepspeed.utils.zero_to_torch": "deepspeed.tools.zero_to_torch",
}
# The documents also name these two packages without `runtime`.
MODULES |= {
    path.replace(".runtime", "", 1): ours
    for path, ours in MODULES.items()
    if path.startswith(("deepspeed.runtime.zero.", "deepspeed.runtime.pipe"))
}

# Documented module -> {our module: the documented names that are there, or "name=ours" where the name differs}.
# The documented module may be one of ours or exist only here.
_NAMES_BY_MODULE = {
    "deepspeed.autotuning": {"deepspeed.tools.autotuning.autotuner": "Autotuner"},
    "deepspeed.checkpoint": {
        "deepspeed.checkpoint.constants": """
            BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP BUFFER_NAMES CLIP_GRAD DS_VERSION FP32_FLAT_GROUPS
            FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES GROUP_PADDINGS LOSS_SCALER OPTIMIZER_STATE_DICT
            ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM PARAMETER_TO_AVERAGE_PATTERNS
            PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS
            PARAM_SHAPES PARAM_SLICE_MAPPINGS PARTITION_COUNT PIPELINE_REPLICATED_PARAMETER_PATTERNS
            SINGLE_PARTITION_OF_FP32_GROUPS TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO
            UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS
            ZERO_STAGE
        """,
        "deepspeed.compat.checkpoint.universal_checkpoint": "SubparamShape enable_universal_checkpoint",
        "deepspeed.compat.checkpoint.deepspeed_checkpoint": "DeepSpeedCheckpoint ZeROCheckpoint",
        "deepspeed.compat.checkpoint.utils": """
            get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank
        """,
        "deepspeed.compat.checkpoint.reshape_3d_utils": """
            get_model_3d_descriptor model_3d_desc reshape_meg_2d_parallel
        """,
        "deepspeed.compat.checkpoint.reshape_utils": "merge_state",
    },
    "deepspeed.compression": {
        "deepspeed.compression.scheduler": "compression_scheduler",
        "deepspeed.compression.compress": "init_compression redundancy_clean",
    },
    # earlier builds installed it as the entry point of `ds_check`
    "deepspeed.config_check": {"deepspeed.tools.config.command": "check_config main"},
    "deepspeed.elasticity": {
        "deepspeed.tools.elastic.elastic_agent": "DSElasticAgent",
        "deepspeed.config.elastic_batch": """
            compute_elastic_config elasticity_enabled ensure_immutable_elastic_config
        """,
    },
    **dict.fromkeys(
        ("deepspeed.inference", "deepspeed.inference.v2"),
        {
            "deepspeed.inference.v2.config_v2": "DeepSpeedTPConfig RaggedInferenceEngineConfig",
            "deepspeed.inference.v2.engine_v2": """
                InferenceEngineV2 build_engine_from_ds_checkpoint build_hf_engine
            """,
        },
    ),
    "deepspeed.inference.v2.checkpoint": {
        "deepspeed.inference.v2.checkpoint.huggingface_engine": """
            CheckpointEngineBase HuggingFaceCheckpointEngine InMemoryModelEngine
        """,
    },
    "deepspeed.inference.v2.ragged": {
        "deepspeed.inference.v2.config_v2": """
            AllocationMode DSStateManagerConfig KVCacheConfig KVCacheType MemoryConfig
        """,
    },
    "deepspeed.module_inject": {"deepspeed.compat.module_inject.replacing": "replace_transformer_layer"},
    "deepspeed.module_inject.auto_ep_config": {
        "deepspeed.config.sections.parallel": "AutoEPConfig parse_autoep_config validate_autoep_config",
    },
    "deepspeed.module_inject.auto_tp": {
        "deepspeed.parallel.tensor.planning.autotp_config": "AutoTPConfig PartitionType TPLayerSpec",
    },
    **dict.fromkeys(
        ("deepspeed.module_inject.containers", "deepspeed.module_inject.containers.gpt2"),
        {"deepspeed.compat.module_inject.replace_policy": "HFGPT2LayerPolicy"},
    ),
    "deepspeed.module_inject.replace_module": {
        "deepspeed.compat.module_inject.replacing": """
            replace_transformer_layer revert_transformer_layer=revert_layers
        """,
    },
    "deepspeed.moe.sharded_moe": {
        "deepspeed.compat.moe_gating": """
            TUTEL_INSTALLED _capacity=capacity _one_hot_to_float=one_hot_to_float _top_idx=top_idx
            exp_selection_uniform_map gumbel_rsample
        """,
    },
    "deepspeed.ops": {
        "deepspeed.ops.transformer.transformer": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
    },
    "deepspeed.ops.adam.fused_adam": {"deepspeed.ops.adam.multi_tensor_apply": "multi_tensor_applier"},
    "deepspeed.ops.op_builder.async_io": {"deepspeed.ops.op_builder": "AsyncIOBuilder"},
    "deepspeed.ops.op_builder.evoformer_attn": {"deepspeed.ops.op_builder": "EvoformerAttnBuilder"},
    "deepspeed.ops.op_builder.gds": {"deepspeed.ops.op_builder": "GDSBuilder"},
    "deepspeed.ops.triton_ops": {"deepspeed.ops.triton_ops.swiglu_triton": "swiglu"},
    "deepspeed.profiling.flops_profiler": {
        "deepspeed.observe.flops.profiler": "FlopsProfiler get_model_profile",
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "deepspeed.transforms.recompute.rng": """
            _set_cuda_rng_state=set_device_state _MODEL_PARALLEL_RNG_TRACKER_NAME=MODEL_PARALLEL_RNG
        """,
        "deepspeed.compat.runtime_utils": "detach_variable",
    },
    "deepspeed.runtime": {"deepspeed.zero.optimizer": "ZeROOptimizer"},
    "deepspeed.runtime.engine": {
        "deepspeed.parallel.expert.layer": "MoE",
        "deepspeed.compat.torch_autocast": "autocast_if_enabled",
    },
    "deepspeed.runtime.utils": {
        "deepspeed.comm.documented_groups": "bwc_tensor_model_parallel_rank",
        "deepspeed.compat.absent": "graph_process",
        "torch": "inf",
    },
    "deepspeed.runtime.pipe": {
        "deepspeed.engine.pipeline.dualpipev": "DualPipeVModule",
        "deepspeed.parallel.pipeline.module": "LayerSpec PipelineModule TiedLayerSpec",
        "deepspeed.comm.topology": "ProcessTopology",
        "deepspeed.parallel.pipeline.causal_lm": "cut_causal_lm",
    },
    "deepspeed.runtime.pipe.engine": {
        "deepspeed.engine.pipeline.instructions": """
            BATCH_INPUT_TIMER PIPE_RECV_GRAD_TIMER PIPE_RECV_INPUT_TIMER PIPE_SEND_GRAD_TIMER PIPE_SEND_OUTPUT_TIMER
            TRAIN_BATCH_TIMER
        """,
        "deepspeed.engine.engine": "DeepSpeedEngine",
    },
    "deepspeed.runtime.zero": {
        "deepspeed.zero.gathering.init_context": """
            DeepSpeedTensorOverride GatheredParameters Init ZeroParamStatus ZeroParamType
            register_external_parameter unregister_external_parameter
        """,
        "deepspeed.zero.parameter_offload": "DeepSpeedZeRoOffload",
        "deepspeed.zero.mics": "MiCS_Init",
        "deepspeed.transforms.tiled_linear": "TiledLinear TiledLinearReturnBias",
        "deepspeed.zero.gathering.gathered_parameters": "unwrap_model_for_generation",
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "deepspeed.parallel.sequence.tiled.functions": """
            AutogradComputeMLP SequenceTiledCompute TiledFusedLogitsLoss TiledLoss TiledMLP sequence_tiled_compute
        """,
        "deepspeed.parallel.sequence.hf.attention": "UlyssesSPAttentionHF",
        "deepspeed.parallel.sequence.hf.dataloader": "UlyssesSPDataLoaderAdapter",
        "deepspeed.parallel.sequence.tiled.logits_training": "UlyssesSPFwdLossBwdWithLogits",
    },
    "deepspeed.comm.mori": {"deepspeed.compat.absent": "is_enabled"},
    "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine": {
        "deepspeed.compat.absent": "NebulaCheckpointEngine",
    },
    "deepspeed.utils.tensor_fragment": {
        "deepspeed.checkpoint.files.safe_types": "fragment_address=FragmentAddress",
    },
    "deepspeed.utils.zero_to_fp32": {"deepspeed.compat.absent": "parse_optim_states"},
    "deepspeed.zero.gathering.init_context": {"deepspeed.ops.formats.op_quantizer": "CUDAQuantizer"},
    "deepspeed.zero.optimizer": {
        "deepspeed.compat.zero_memory": """
            estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold
            estimate_zero2_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs
            estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live
        """,
        "deepspeed.zero.gathering.gathered_parameters": "unwrap_model_for_generation",
    },
    "deepspeed.sequence": {
        "deepspeed.parallel.sequence.autosp_fusion": """
            InternVLFusionAdapter LlavaFusionAdapter Qwen2VLFusionAdapter
        """,
        "deepspeed.parallel.sequence.autosp_vit": "UlyssesSPViTAttention",
        "deepspeed.parallel.sequence.auto_sp": "auto_wrap_model_for_sp detect_model_sp_info",
    },
    "deepspeed.sequence.layer": {"deepspeed.parallel.expert.sharded_moe": "_DimZeroAllToAll=AllToAll"},
    "deepspeed.utils": {
        "deepspeed.data.loader": "RepeatingLoader",
        "deepspeed.comm.record": "get_caller_func",
        "deepspeed.base.exceptions": "DeprecatedException",
        "deepspeed.comm.documented_groups": """
            get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group
            get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group
            get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size
            initialize set_tensor_model_parallel_rank set_tensor_model_parallel_world_size
        """,
        "deepspeed.transforms.on_device": "OnDevice",
        "deepspeed.base.numa": "get_numactl_cmd",
        "deepspeed.compat.utils.nvtx": "instrument_w_nvtx",
        "deepspeed.zero.tensor_fragment": """
            get_full_hp_grad get_full_hp_param safe_get_full_fp32_param safe_get_full_grad
            safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad
            safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
            safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
            safe_update_full_grad_vectorized set_full_hp_grad set_full_hp_param
        """,
        "deepspeed.zero.gathering.leaf_modules": """
            apply_zero_leaf_module_config get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules
            set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_parameter
        """,
        "deepspeed.checkpoint.files.safe_types": "fragment_address=FragmentAddress",
        "deepspeed.comm": "is_initialized",
        "deepspeed.compat.absent": "link_hp_params",
    },
    "deepspeed.config.deepspeed_config": {
        "deepspeed.config.getters": "get_gradient_clipping get_log_level",
        "deepspeed.config.constants": "ADAM_W_MODE ADAM_W_MODE_DEFAULT TORCH_ADAM_PARAM",
    },
}
NAMES = {
    documented: {
        name.partition("=")[0]: f"{module}:{ours}" if (ours := name.partition("=")[2]) else module
        for module, names in by_module.items()
        for name in names.split()
    }
    for documented, by_module in _NAMES_BY_MODULE.items()
}
# Our packages whose documented submodules clients reach by attribute access after only `import deepspeed`.
SUBMODULES = {
    "deepspeed.moe": ("layer", "utils"),
    "deepspeed.launcher": ("multinode_runner", "runner"),
    "deepspeed.ops": ("adagrad", "adam", "aio", "gds", "lamb", "lion", "op_builder"),
    "deepspeed.runtime": """
        activation_checkpointing config config_utils constants dataloader engine lr_schedules pipe utils zero
    """.split(),
    "deepspeed.runtime.zero": ("config", "offload_config", "partition_parameters", "stage_1_and_2"),
    "deepspeed.utils": "debug groups logging numa nvtx tensor_fragment timer zero_to_fp32".split(),
}
