"""Signatures of documented names that come later, by module; `later.py` explains the lines.

What clients are known to import is listed here, the rest of the documented interface in `later_names.txt`.
"""

from __future__ import annotations

import os

# Path prefix -> what to do until then. The longest match is quoted in the refusal.
INSTEAD = {
    "deepspeed.accelerator": "Until then run on the CPU or on a CUDA device: DS_ACCELERATOR=cpu or cuda.",
    "deepspeed.autotuning": "Until then choose micro-batch size and ZeRO stage by hand; see ds_check.",
    "deepspeed.checkpoint": "load_checkpoint() takes a checkpoint of any world size and stage, without conversion.",
    "deepspeed.checkpoint.autoep": "Checkpoints hold whole experts: any number of ranks loads them.",
    "deepspeed.comm": "Communication here is torch.distributed; deepspeed.comm has its functions.",
    "deepspeed.compat": "On Python 3.10 and newer use inspect.get_annotations.",
    "deepspeed.compile": "Until then use engine.compile(), which is torch.compile of the module.",
    "deepspeed.compression": "Until then use torch.ao.quantization or torch.nn.utils.prune.",
    "deepspeed.compression.config": "deepspeed.check_config reads and checks the section compression_training.",
    "deepspeed.datastates": "Until then save with engine.save_checkpoint().",
    "deepspeed.elasticity": "Until then choose train_batch_size for one world size, and resume on any other.",
    "deepspeed.env_report": "ds_report prints what is known about the device and its libraries.",
    "deepspeed.inference": "deepspeed.init_inference and build_hf_engine make all parts of their engines.",
    "deepspeed.io": "The writers of deepspeed.io manage their buffers themselves.",
    "deepspeed.launcher": "Until then start one `deepspeed --node_rank N --no_ssh` per host, or use torchrun.",
    "deepspeed.linear": "Until then use peft for LoRA adapters.",
    "deepspeed.module_inject": "Until then use torch.distributed.tensor.parallel on the module.",
    "deepspeed.moe": "The config section expert_parallel spreads the experts of Transformers models over ranks.",
    "deepspeed.nvme": "The commands ds_io and ds_nvme_tune measure and tune file access.",
    "deepspeed.ops.adam": "Until then use DeepSpeedCPUAdam or FusedAdam.",
    "deepspeed.ops.deepspeed4science": "Until then use torch.nn.functional.scaled_dot_product_attention.",
    "deepspeed.ops.fp_quantizer": "Until then use torch.float8_e4m3fn or torchao.",
    "deepspeed.ops.lion": "Until then use FusedLion, which steps over all tensors at once.",
    "deepspeed.ops.op_builder": "Nothing is compiled at run time here: a builder's load() returns what is installed.",
    "deepspeed.ops.quantizer": "Until then use torchao.",
    "deepspeed.ops.random_ltd": "Until then select tokens with torch.gather.",
    "deepspeed.ops.sparse_attention": "Until then use torch.nn.attention.flex_attention.",
    "deepspeed.ops.transformer": "Until then use torch.nn.TransformerEncoderLayer.",
    "deepspeed.ops.transformer.inference": "Until then use the model's own layers, or transformers.",
    "deepspeed.ops.triton_ops": "Until then use the operations of torch.nn.functional.",
    "deepspeed.profiling": "Until then use torch.utils.flop_counter.FlopCounterMode.",
    "deepspeed.runtime.activation_checkpointing": "deepspeed.checkpointing.configure() and checkpoint() do this.",
    "deepspeed.runtime.base_optimizer": "Gradients are reduced by hooks of the engine; plain loss.backward() works.",
    "deepspeed.runtime.checkpoint_engine": "Until then save with engine.save_checkpoint().",
    "deepspeed.runtime.comm": "Use the functions of deepspeed.comm.",
    "deepspeed.runtime.compiler": "Use torch.compiler, or engine.compile().",
    "deepspeed.runtime.compression": "Until then leave communication uncompressed.",
    "deepspeed.runtime.data_pipeline": "Until then sample and truncate in the dataset or its collate_fn.",
    "deepspeed.runtime.domino": "Until then use torch.distributed.tensor.parallel on the module.",
    "deepspeed.runtime.eigenvalue": "Until then use torch.autograd.functional.hvp.",
    "deepspeed.runtime.engine": "deepspeed.initialize() makes all parts of an engine.",
    "deepspeed.runtime.fp16": "The engine makes its own from the fp16 section of the config.",
    "deepspeed.runtime.fp16.onebit": "Until then use Adam or Lamb.",
    "deepspeed.runtime.hybrid_engine": "DeepSpeedHybridEngine.generate decodes without graphs.",
    "deepspeed.runtime.model_checkpointing": "deepspeed.check_config reads and checks the section checkpoint.",
    "deepspeed.runtime.progressive_layer_drop": "Until then drop layers in the model's forward.",
    "deepspeed.runtime.quantize": "Until then use torch.ao.quantization.",
    "deepspeed.runtime.rollout": "Until then generate with engine.module, or with vllm beside the engine.",
    "deepspeed.runtime.sparse_tensor": "With sparse_gradients the engine reduces torch's sparse gradients itself.",
    "deepspeed.runtime.state_dict_factory": "Until then load weights with torch.load or safetensors.",
    "deepspeed.runtime.swap_tensor": "offload_optimizer and offload_param with device nvme do this.",
    "deepspeed.runtime.tensor_parallel": "Until then use torch.distributed.tensor.parallel on the module.",
    "deepspeed.runtime.torch_autocast": "Set torch_autocast.enabled in the config; the engine does the rest.",
    "deepspeed.runtime.utils": "The engine does this itself; training scripts have no need of it.",
    "deepspeed.runtime.weight_quantizer": "Until then use torchao.",
    "deepspeed.runtime.zenflow": "The engine does this itself with zero_optimization.zenflow in the config.",
    "deepspeed.runtime.zero": "Use deepspeed.zero.GatheredParameters and deepspeed.utils.safe_get_full_fp32_param.",
    "deepspeed.utils.config": "DeepSpeedConfig(...).timers_config has the section timers.throughput.",
    "deepspeed.utils.mixed_precision_linkage": "Engines link by themselves; see safe_get_full_fp32_param.",
    "deepspeed.utils.pin_memory": "Use get_accelerator().pin_memory(tensor), or an aio handle's pinned tensors.",
    "deepspeed.utils.static_cache": "Until then use transformers.StaticCache.",
    "deepspeed.utils.tensor_fragment": "Use deepspeed.utils.safe_get_full_fp32_param and its siblings.",
    "deepspeed.utils.zero_to_fp32": "Use get_fp32_state_dict_from_zero_checkpoint().",
}

LATER: dict[str, tuple[str, ...]] = {
    "deepspeed.autotuning.autotuner": (
        "class Autotuner(args, active_resources): print_tuning_results metric fast_enabled "
        "max_train_batch_size mp_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes fp16_enabled "
        "get_gpu_memory_info get_activation_memory_per_gpu get_instantiation_memory_required_per_gpu "
        "tune tune_space get_plateau_mbs get_model_num_params model_info_profile_run update_records "
        "get_best_space_record get_best_space_records run_tuning_micro_batch_sizes "
        "get_min_max_micro_batch_size get_gas_from_user_config get_val_from_user_args "
        "get_tuning_micro_batch_size_list run_ds_config write_optimal_config run_after_tuning",
    ),
    "deepspeed.compile.backend": (
        "def make_backend(backend, compile_config, compile_kwargs={}, owned_frames=None)",
        "def register_compile_pass(name, opt_pass_fn, contract=None)",
    ),
    "deepspeed.compile.init_z3": (
        "def init_z3(engine, backend, compile_config, compile_kwargs, schedule=None)",
    ),
    "deepspeed.compile.passes.offload_adam_states": (
        "def move_opt_states(gm, graph_id, graph_order, profiling_results, create_inputs_fn, "
        "mem_budget, param_manager, bwd)",
        "def move_opt_states_sync(gm, graph_id, graph_order, profiling_results, create_inputs_fn, "
        "mem_budget, param_manager, bwd)",
        "def offload_adam_states_for_init(gm, graph_id, graph_order, profiling_results, "
        "create_inputs_fn, mem_budget, param_manager, bwd)",
    ),
    "deepspeed.compile.passes.prefetch": (
        "def schedule_prefetch(gm, graph_id, graph_order, profiling_results, create_inputs_fn, "
        "mem_budget, param_manager, bwd)",
    ),
    "deepspeed.compile.passes.selective_gather": (
        "def selective_gather(gm, graph_id, graph_order, profiling_results, create_inputs_fn, "
        "mem_budget, param_manager, bwd)",
    ),
    "deepspeed.compile.passes.zero3_compile": (
        "def add_z3_gather_release(gm, graph_id, graph_order, profiling_results, create_inputs_fn, "
        "mem_budget, param_manager, bwd)",
    ),
    "deepspeed.compression.compress": (
        "def init_compression(model, deepspeed_config, teacher_model=None, mpu=None)",
        "def redundancy_clean(model, deepspeed_config, mpu=None)",
        "def student_initialization(student_model, teacher_model, deepspeed_config)",
    ),
    "deepspeed.compression.helper": (
        "def module_replacement(model, module_name, compression_technique=None, mpu=None)",
    ),
    "deepspeed.compression.scheduler": (
        "class compression_scheduler(model, compression_config): make_init check_weight_quantization "
        "check_activation_quantization check_sparse_pruning check_head_pruning check_row_pruning "
        "check_channel_pruning check_all_modules step",
    ),
    "deepspeed.elasticity.elastic_agent": (
        "class DSElasticAgent(spec, env, start_method='spawn', exit_barrier_timeout=300, log_dir=None)",
    ),
    "deepspeed.elasticity.elasticity": (
        "def compute_elastic_config(ds_config, target_deepspeed_version, world_size=0, "
        "return_microbatch=False)",
        "def elasticity_enabled(ds_config)",
        "def ensure_immutable_elastic_config(runtime_elastic_config_dict)",
    ),
    "deepspeed.linear.config": (
        "class LoRAConfig(**data)",
        "class QuantizationConfig(**data)",
    ),
    "deepspeed.linear.context_manager": (
        "class Init(lora_config=None, quant_config=None)",
        "def init_lora(model)",
    ),
    "deepspeed.linear.optimized_linear": (
        "class LoRAOptimizedLinear(input_dim, output_dim, bias=False, lora_config=None, "
        "quantization_config=None, device=None, dtype=torch.bfloat16, linear_cls=nn.Linear): disable "
        "init_lora full_weight linear_without_F_linear forward",
        "class OptimizedLinear(**data)",
    ),
    "deepspeed.linear.quantization": (
        "class QuantizedLinear(input_dim, output_dim, bias=False, quantization_config=None, "
        "dtype=torch.bfloat16): forward",
        "class QuantizedParameter(**data): dequantized offload cuda to",
    ),
    "deepspeed.module_inject.auto_ep_config": (
        "def parse_autoep_config(param_dict)",
        "def validate_autoep_config(config, world_size, pp_size, tp_size, sp_size, *, zero_stage=0, "
        "deepcompile_enabled=False, tp_preset_model=None, use_data_before_expert_parallel=False, "
        "mpu=None, zero_offload_optimizer=False, zero_offload_param=False)",
    ),
    "deepspeed.module_inject.auto_ep_presets.base": ("class AutoEPConfig(**data)",),
    "deepspeed.module_inject.inject": (
        "def module_inject(layer_obj, model, config, micro_batch_size, max_seq_length, seed, preln, "
        "fp16=True)",
    ),
    "deepspeed.module_inject.layers": ("def set_autotp_mode(training=False)",),
    "deepspeed.module_inject.policy": ("class DSPolicy(): attention",),
    "deepspeed.module_inject.replace_module": (
        "def replace_transformer_layer(orig_layer_impl, model, checkpoint_dict, config, model_config)",
        "def revert_transformer_layer(orig_layer_impl, model, config, preln=False)",
    ),
    "deepspeed.module_inject.replace_policy": ("class HFGPT2LayerPolicy(client_module, inference=True)",),
    "deepspeed.ops.adam.zenflow_torch_adam": (
        "class ZenFlowSelectiveAdamW(*args, offload=False, bucket_size=500000000.0, **kwargs): "
        "temp_copy_param copy_mv_from_cpu copy_mv_to_cpu clear_selected_mv group_step",
    ),
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": (
        "class BertSparseSelfAttention(config, sparsity_config=FixedSparsityConfig(num_heads=4)): "
        "transpose_for_scores forward",
    ),
    "deepspeed.ops.sparse_attention.sparse_attention_utils": (
        "class SparseAttentionUtils(**data): extend_position_embedding "
        "update_tokenizer_model_max_length replace_model_self_attention_with_sparse_self_attention "
        "replace_self_attention_layer_with_sparse_self_attention_layer pad_to_block_size "
        "unpad_sequence_output",
    ),
    "deepspeed.ops.sparse_attention.sparse_self_attention": (
        "class SparseSelfAttention(sparsity_config=SparsityConfig(num_heads=4), "
        "key_padding_mask_mode='add', attn_mask_mode='mul', max_seq_length=2048): get_layout get_ops "
        "transpose_key_for_scores transpose_mask_for_sparse forward",
    ),
    "deepspeed.ops.sparse_attention.sparsity_config": (
        "class BSLongformerSparsityConfig(num_heads, block=16, different_layout_per_head=False, "
        "num_sliding_window_blocks=3, global_block_indices=[0], global_block_end_indices=None, "
        "attention='bidirectional'): set_sliding_window_layout set_global_layout make_layout "
        "setup_layout check_and_propagate_first_head_layout",
        "class BigBirdSparsityConfig(num_heads, block=16, different_layout_per_head=False, "
        "num_random_blocks=1, num_sliding_window_blocks=3, num_global_blocks=1, "
        "attention='bidirectional'): set_random_layout set_sliding_window_layout set_global_layout_itc "
        "make_layout setup_layout check_and_propagate_first_head_layout",
        "class DenseSparsityConfig(num_heads, block=16, different_layout_per_head=False): make_layout "
        "setup_layout check_and_propagate_first_head_layout",
        "class FixedSparsityConfig(num_heads, block=16, different_layout_per_head=False, "
        "num_local_blocks=4, num_global_blocks=1, attention='bidirectional', "
        "horizontal_global_attention=False, num_different_global_patterns=1): set_local_layout "
        "set_global_layout make_layout setup_layout check_and_propagate_first_head_layout",
        "class LocalSlidingWindowSparsityConfig(num_heads, block=16, num_sliding_window_blocks=3, "
        "attention='unidirectional'): set_sliding_window_layout make_layout setup_layout "
        "check_and_propagate_first_head_layout",
        "class VariableSparsityConfig(num_heads, block=16, different_layout_per_head=False, "
        "num_random_blocks=0, local_window_blocks=[4], global_block_indices=[0], "
        "global_block_end_indices=None, attention='bidirectional', horizontal_global_attention=False): "
        "set_random_layout set_local_layout set_global_layout make_layout setup_layout "
        "check_and_propagate_first_head_layout",
    ),
    "deepspeed.ops.transformer.transformer": (
        "class DeepSpeedTransformerConfig(batch_size=-1, hidden_size=-1, intermediate_size=-1, "
        "heads=-1, attn_dropout_ratio=-1, hidden_dropout_ratio=-1, num_hidden_layers=-1, "
        "initializer_range=-1, layer_norm_eps=1e-12, local_rank=-1, seed=-1, fp16=False, "
        "pre_layer_norm=True, normalize_invertible=False, gelu_checkpoint=False, "
        "adjust_init_range=True, attn_dropout_checkpoint=False, stochastic_mode=False, "
        "return_tuple=False, training=True): from_dict from_json_file",
        "class DeepSpeedTransformerLayer(config, initial_weights=None, initial_biases=None): "
        "init_transformer_weights forward",
    ),
    "deepspeed.profiling.flops_profiler.profiler": (
        "class FlopsProfiler(model, ds_engine=None, recompute_fwd_factor=0.0): start_profile "
        "stop_profile reset_profile end_profile get_total_flops get_total_macs get_total_duration "
        "get_total_params is_expert_tensor_parallelism_enabled print_model_profile "
        "print_model_aggregated_profile",
        "def get_model_profile(model, input_shape=None, args=[], kwargs={}, print_profile=True, "
        "detailed=True, module_depth=-1, top_modules=1, warm_up=1, as_string=True, output_file=None, "
        "ignore_modules=None, mode='forward')",
    ),
    "deepspeed.runtime.checkpoint_engine.utils": (
        "def create_checkpoint_engine(config_params, groups, zero_stage, has_moe_layers, optimize_dp_state)",
    ),
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": (
        "class CurriculumScheduler(config): get_current_difficulty set_current_difficulty "
        "set_custom_get_difficulty get_state set_state get_difficulty update_difficulty",
    ),
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": (
        "class RandomLayerTokenDrop(layer): init_config get_bsh get_sbh forward",
    ),
    "deepspeed.runtime.data_pipeline.data_routing.helper": (
        "def convert_to_random_ltd(model, convert_type)",
        "def save_without_random_ltd(model)",
    ),
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": (
        "class RandomLTDScheduler(config): get_total_layer_tokens reset_to_init get_current_seq "
        "set_current_seq get_random_ltd_layer_num get_state set_state update_seq state_dict "
        "load_state_dict get_value",
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": (
        "class DataAnalyzer(dataset, num_workers=1, worker_id=0, num_threads=1, num_threads_reduce=1,"
        " specific_threads=[], batch_size=1, metric_names=[], metric_functions=[], metric_types=[], "
        "metric_dtypes=[], save_path='./', collate_fn=None, custom_map_init=None, "
        "custom_map_update=None, custom_map_finalize=None, custom_reduce=None, sample_indices=None): "
        "init_metric_results update_metric_results finalize_metric_results run_map_helper run_map "
        "get_metric_value_percentiles merge_gather_map_stats merge_sample_to_metric "
        "merge_metric_to_sample merge_map_results output_index_to_sample_percentile run_reduce "
        "run_map_reduce",
        "class DistributedDataAnalyzer(dataset, num_workers=1, num_threads=1, worker_id=0, "
        "batch_size=1, metric_names=[], metric_functions=[], metric_types=[], save_path='./', "
        "collate_fn=None, device='cuda', comm_group=None, sample_indices=None): run_map_helper "
        "run_map_reduce file_write_ordered",
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": (
        "class DeepSpeedDataSampler(data_efficiency_config, one_epoch_total_samples, "
        "micro_batch_size, data_parallel_rank, data_parallel_size, data_parallel_group, "
        "gradient_accumulation_steps, global_rank, drop_last=True): "
        "set_custom_curriculum_learning_schedule get_start_end_idx get_sample_based_on_metric_value "
        "get_sample_based_on_metric_percentile get_new_cluster sample_from_clusters "
        "reshuffle_clusters get_sample_from_cluster get_next_global_batch state_dict load_state_dict",
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": (
        "class MMapIndexedDataset(**data)",
        "class MMapIndexedDatasetBuilder(out_file, dtype=np.int64): add_item add_items add_item_numpy"
        " end_document merge_file_ finalize",
        "def make_dataset(path, impl, skip_warmup=False)",
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": (
        "class VariableBatchSizeLR(lr_scheduler, base_batch_size, batch_sizes, dataloader, "
        "lr_scaling_method='linear', last_epoch=-1, verbose=False): optimizer state_dict "
        "load_state_dict get_last_lr get_lr step",
        "def batch_by_seqlens(seqlens, max_tokens, sequence_ids_per_mb=None, min_batch_size=1, "
        "max_batch_size=None, sequence_picking_order='dataloader', effective_batch_size=1, "
        "required_microbatches_of_same_size=False, verbose=False, seed=None)",
        "def get_dataloader_and_lr_scheduler_for_variable_batch_size(dataset, dataset_seqlens, "
        "max_tokens, effective_batch_size, dataset_filter_ids=None, lr_scaling_method='linear', "
        "min_batch_size=1, max_batch_size=None, sequence_picking_order='dataloader', "
        "dataloader_batch_size=1, dataloader_rank=0, dataloader_num_replicas=1, "
        "dataloader_num_workers=0, dataloader_collate_fn=None, dataloader_pin_memory=False, "
        "lr_scheduler_or_optimizer=None, required_microbatches_of_same_size=False, "
        "required_microbatches_of_same_seqlen=False, sample_padding_fn=None, verbose=False, "
        "seed=None)",
        "def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(dataset, engine, "
        "dataset_seqlens=None, dataset_filter_ids=None, dataloader_collate_fn=None, "
        "sample_padding_fn=None, batch_seqlens_fn=None)",
    ),
    "deepspeed.runtime.domino.transformer": (
        "class DominoTransformer(config, mpu, apply_rotary_pos_emb, model_type, "
        "layer_type=LayerType.encoder, self_attn_mask_type=AttnMaskType.causal, post_layer_norm=True,"
        " pre_process=True, post_process=True, drop_path_rate=0.0): forward "
        "inter_layer_overlap_forward intra_layer_overlap_forward",
    ),
    "deepspeed.runtime.eigenvalue": (
        "class Eigenvalue(verbose=False, max_iter=100, tol=0.01, stability=0, "
        "gas_boundary_resolution=1, layer_name='', layer_num=0): nan_to_num normalize inner_product "
        "get_layers compute_eigenvalue post_process",
    ),
    "deepspeed.runtime.fp16.loss_scaler": (
        "def CreateLossScaler(dtype, static_loss_scale, dynamic_scaling, dynamic_loss_args)",
        "class DynamicLossScaler(init_scale, scale_window, min_scale, delayed_shift, "
        "consecutive_hysteresis, raise_error_at_min_scale=True, dtype=torch.half): has_overflow_serial "
        "update_scale loss_scale scale_gradient scale_loss backward",
    ),
    "deepspeed.runtime.fp16.onebit.adam": (
        "class OnebitAdam(params, deepspeed=None, lr=0.001, freeze_step=100000, bias_correction=True,"
        " betas=(0.9, 0.999), eps=1e-08, eps_inside_sqrt=False, weight_decay=0.0, max_grad_norm=0.0, "
        "amsgrad=False, cuda_aware=False, comm_backend_name='nccl'): step load_state_dict",
    ),
    "deepspeed.runtime.fp16.onebit.lamb": (
        "class OnebitLamb(params, deepspeed=None, lr=0.001, freeze_step=100000, bias_correction=True,"
        " betas=(0.9, 0.999), eps=1e-08, eps_inside_sqrt=False, weight_decay=0.0, max_grad_norm=0.0, "
        "max_coeff=10.0, min_coeff=0.01, amsgrad=False, cuda_aware=False, comm_backend_name='nccl', "
        "coeff_beta=0.9, factor_max=4.0, factor_min=0.5, factor_threshold=0.1): step load_state_dict "
        "get_lamb_coeffs",
    ),
    "deepspeed.runtime.fp16.onebit.zoadam": (
        "class ZeroOneAdam(params, deepspeed=None, lr=0.001, bias_correction=True, betas=(0.9, "
        "0.999), eps=1e-08, eps_inside_sqrt=False, weight_decay=0.0, max_grad_norm=0.0, "
        "var_freeze_step=100000, var_update_scaler=16, local_step_scaler=32678, "
        "local_step_clipper=16, amsgrad=False, cuda_aware=False, comm_backend_name='nccl'): step "
        "load_state_dict",
    ),
    "deepspeed.runtime.fp16.unfused_optimizer": (
        "class FP16_UnfusedOptimizer(init_optimizer, deepspeed=None, loss_scale_config=None, "
        "low_precision_dtype=torch.float16, static_loss_scale=1.0, dynamic_loss_scale=False, "
        "dynamic_loss_args=None, verbose=True, mpu=None, clip_grad=0.0, fused_lamb_legacy=False): "
        "zero_grad step_fused_lamb set_lr get_lr override_loss_scale step unscale_and_clip_grads "
        "backward state_dict refresh_fp32_params load_state_dict initialize_optimizer_states",
    ),
    "deepspeed.runtime.progressive_layer_drop": (
        "class ProgressiveLayerDrop(theta=0.5, gamma=0.001): get_state get_theta update_state",
    ),
    "deepspeed.runtime.torch_autocast": (
        "def get_default_autocast_lower_precision_modules()",
        "def init_autocast_params(engine, dtype, torch_autocast_lower_precision_safe_modules)",
        "def is_autocast_initialized()",
    ),
    "deepspeed.runtime.zenflow.engine_stage3": ("def configure_zenflow(optimizer_z3, zenflow_config)",),
    "deepspeed.runtime.zero.partitioned_param_coordinator": (
        "class PartitionedParameterCoordinator(prefetch_bucket_sz, max_reuse_distance_in_numel, "
        "max_available_parameters_in_numel, allgather_stream, inflight_param_registry, "
        "prefetch_nvme=False, timers=None, zero_quantized_weights=False, "
        "zero_quantized_nontrainable_weights=False, fast_sharding_for_leaf_module=False, "
        "log_trace_cache_warnings=False): is_complete_trace is_invalid_trace is_record_trace "
        "trace_prologue record_module record_parameters construct_parameter_trace_from_module_trace "
        "reset_step fetch_sub_module release_sub_module release_and_reset_all "
        "release_backward_leftovers _invalidate_trace",
    ),
    "deepspeed.utils.mixed_precision_linkage": (
        "def link_hp_params(lp_param_list, flat_hp_partition, gradient_dict, offload_gradient_dict, use_offload, "
        "param_group_index, partition_start, partition_size, dp_group)",
        "def lazy_init_hp_params_optimizer_state(lp_param_list, flat_hp_partition, optimizer_state)",
    ),
}


def _read_rows(path: str) -> dict[str, list[str]]:
    """`[module]`, then one row per line; an indented line continues the row above."""
    rows: dict[str, list[str]] = {}
    current: list[str] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.startswith("["):
                current = rows.setdefault(line.strip()[1:-1], [])
            elif line.startswith(" "):
                current[-1] += f" {line.strip()}"
            elif line.strip() and not line.startswith("#"):
                current.append(line.strip())
    return rows


for _module, _rows in _read_rows(os.path.join(os.path.dirname(__file__), "later_names.txt")).items():
    LATER[_module] = (*LATER.get(_module, ()), *_rows)
