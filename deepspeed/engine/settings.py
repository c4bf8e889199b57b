"""Config getters of the engine as one table: ``engine.zero_optimization_stage()`` reads ``config.zero_config.stage``.

A row is ``name -> path`` into the ``DeepSpeedConfig``; for a missing section the getter returns None.
"""

from __future__ import annotations

from typing import Any

_ACCESSORS: dict[str, str] = {
    # batch and loop
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dump_state": "dump_state",
    "log_level": "log_level",
    "dataloader_drop_last": "dataloader_drop_last",
    # optimizer, schedule, gradients
    "optimizer_name": "optimizer_name",
    "optimizer_params": "optimizer_params",
    "optimizer_legacy_fusion": "optimizer_legacy_fusion",
    "scheduler_name": "scheduler_name",
    "scheduler_params": "scheduler_params",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "sparse_gradients_enabled": "sparse_gradients_enabled",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    # precision
    "fp16_enabled": "float16_config.enabled",
    "fp16_auto_cast": "float16_config.auto_cast",
    "fp16_master_weights_and_gradients": "float16_config.fp16_master_weights_and_grads",
    "loss_scale": "float16_config.loss_scale",
    "bfloat16_enabled": "bfloat16_config.enabled",
    "bfloat16_master_weights_and_gradients": "bfloat16_config.bf16_master_weights_and_grads",
    "bfloat16_optimizer_states": "bfloat16_config.bf16_optimizer_states",
    "bf16_master_weights_and_gradients": "bfloat16_config.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bfloat16_config.bf16_optimizer_states",
    "amp_enabled": "amp.enabled",
    "amp_params": "amp.params",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    # ZeRO
    "zero_optimization": "zero_enabled",
    "zero_optimization_stage": "zero_optimization_stage",
    "zero_offload_optimizer": "zero_config.offload_optimizer",
    "zero_offload_param": "zero_config.offload_param",
    "zero_reduce_bucket_size": "zero_config.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_config.allgather_bucket_size",
    "zero_multi_rank_bucket_allreduce": "zero_config.use_multi_rank_bucket_allreduce",
    "zero_overlap_comm": "zero_config.overlap_comm",
    "zero_reduce_scatter": "zero_config.reduce_scatter",
    "zero_contiguous_gradients": "zero_config.contiguous_gradients",
    "zero_allgather_partitions": "zero_config.allgather_partitions",
    "zero_round_robin_gradients": "zero_config.round_robin_gradients",
    "zero_ignore_unused_parameters": "zero_config.ignore_unused_parameters",
    "zero_load_from_fp32_weights": "zero_config.load_from_fp32_weights",
    "zero_elastic_checkpoint": "zero_config.elastic_checkpoint",
    "zero_sub_group_size": "zero_config.sub_group_size",
    "zero_prefetch_bucket_size": "zero_config.prefetch_bucket_size",
    "zero_max_live_parameters": "zero_config.max_live_parameters",
    "zero_max_reuse_distance": "zero_config.max_reuse_distance",
    "zero_param_persistence_threshold": "zero_config.param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_config.model_persistence_threshold",
    "zero_gather_16bit_weights_on_model_save": "zero_config.gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size": "zero_config.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_config.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_config.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero_config.zero_quantized_gradients",
    "zero_legacy_stage1": "zero_config.legacy_stage1",
    "zero_log_trace_cache_warnings": "zero_config.log_trace_cache_warnings",
    "zero_module_granularity_threshold": "zero_config.module_granularity_threshold",
    "zero_allgather_sequential": "zero_config.allgather_sequential",
    "zero_save_muon_momentum_buffer_in_memory": "zero_config.save_muon_momentum_buffer_in_memory",
    "zeropp_loco_param": "zero_config.zeropp_loco_param",
    "is_sanity_checks_enabled": "zero_config.enable_sanity_checks",
    "zenflow_config": "zero_config.zenflow",
    "mics_shard_size": "zero_config.mics_shard_size",
    # the rest
    "aio_config": "aio_config",
    "checkpoint_tag_validation_enabled": "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail": "checkpoint_tag_validation_fail",
    "use_node_local_storage": "use_node_local_storage",
    "load_universal_checkpoint": "load_universal_checkpoint",
    "checkpoint_serialization_enabled": "checkpoint_config.checkpoint_serialization",
    "elasticity_enabled": "elasticity_enabled",
    "tensor_parallel_config": "tensor_parallel_config",
    "autotp_size": "tensor_parallel_config.autotp_size",
    "activation_checkpointing_config": "activation_checkpointing_config",
    "graph_harvesting": "graph_harvesting",
    "pld_enabled": "pld_enabled",
    "pld_params": "pld_params",
    "pld_theta": "pld_config.theta",
    "pld_gamma": "pld_config.gamma",
    "curriculum_enabled_legacy": "curriculum_enabled_legacy",
    "curriculum_params_legacy": "curriculum_params_legacy",
    "data_efficiency_enabled": "data_efficiency_enabled",
    "data_efficiency_config": "data_efficiency_config",
    "data_sampling_enabled": "data_efficiency_config.data_sampling.enabled",
    "data_sampling_config": "data_efficiency_config.data_sampling",
    "curriculum_learning_enabled": "data_efficiency_config.data_sampling.curriculum_learning.enabled",
    "curriculum_learning_config": "data_efficiency_config.data_sampling.curriculum_learning",
    "random_ltd_enabled": "data_efficiency_config.data_routing.random_ltd.enabled",
    "random_ltd_config": "data_efficiency_config.data_routing.random_ltd",
    "eigenvalue_verbose": "eigenvalue_config.verbose",
    "eigenvalue_max_iter": "eigenvalue_config.max_iter",
    "eigenvalue_tol": "eigenvalue_config.tol",
    "eigenvalue_stability": "eigenvalue_config.stability",
    "eigenvalue_gas_boundary_resolution": "eigenvalue_config.gas_boundary_resolution",
    "eigenvalue_layer_name": "eigenvalue_config.layer_name",
    "eigenvalue_layer_num": "eigenvalue_config.layer_num",
    "flops_profiler_enabled": "flops_profiler_config.enabled",
    "flops_profiler_profile_step": "flops_profiler_config.profile_step",
    "flops_profiler_module_depth": "flops_profiler_config.module_depth",
    "flops_profiler_top_modules": "flops_profiler_config.top_modules",
    "flops_profiler_detailed": "flops_profiler_config.detailed",
    "flops_profiler_output_file": "flops_profiler_config.output_file",
    "flops_profiler_recompute_fwd_factor": "flops_profiler_config.recompute_fwd_factor",
    "autotuning_enabled": "autotuning_config.enabled",
    "autotuning_start_profile_step": "autotuning_config.start_profile_step",
    "autotuning_end_profile_step": "autotuning_config.end_profile_step",
    "autotuning_metric": "autotuning_config.metric",
    "autotuning_metric_path": "autotuning_config.metric_path",
    "autotuning_model_info_path": "autotuning_config.model_info_path",
    "autotuning_profile_model_info": "autotuning_config.model_info.profile",
}


class EngineAccessors:
    """Mixin with one method per row of the table, and the few getters that return more than a config value."""

    _config: Any
    monitor: Any = None
    torch_autocast_z0_gradscaler: Any = None  # the engine's own loss scaler also serves autocast

    def gradient_accumulation_steps(self) -> int:
        return self._config.gradient_accumulation_steps

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.zero_optimization_stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.zero_optimization_stage >= 3

    def zero_cpu_offload(self) -> bool:
        offload = self._config.zero_config.offload_optimizer
        return offload is not None and str(getattr(offload.device, "value", offload.device)) == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        offload = self._config.zero_config.offload_optimizer
        return offload is not None and str(getattr(offload.device, "value", offload.device)) != "none"

    def zero_nvme_offload_optimizer(self) -> bool:
        offload = self._config.zero_config.offload_optimizer
        return offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme"

    def zero_partial_offload(self) -> float:
        """The share of the optimizer's states that is offloaded, where any is."""
        offload = self._config.zero_config.offload_optimizer
        return 1.0 if offload is None else offload.ratio

    def cpuadam_cores_perc(self) -> float:
        """The share of the host's cores for SuperOffload's updates."""
        offload = self._config.zero_config.offload_optimizer
        return 0.9 if offload is None else offload.cpuadam_cores_perc

    def is_first_weights_partition_group(self) -> bool:
        return self.zero_optimization_partition_weights()

    def eigenvalue_enabled(self) -> bool:
        section = self._config.eigenvalue_config
        return section is not None and bool(section.enabled)

    def super_offload(self) -> bool:
        offload = self._config.zero_config.offload_optimizer
        return offload is not None and offload.super_offload

    def swap_tensor_config(self) -> Any:
        """The section that says where parameters are swapped to: ``offload_param``."""
        return self._config.zero_config.offload_param

    def is_elastic_model_parallel_supported(self) -> bool:
        """Version 0.2 of the elasticity algorithm supports model-parallel ranks."""
        section = self._config.elasticity_config
        return section is not None and section.enabled and section.version == 0.2

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def dynamic_loss_scale(self) -> bool:
        return self._config.float16_config.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        return 2.0**self._config.float16_config.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        section = self._config.float16_config
        return {
            "init_scale": 2**section.initial_scale_power,
            "scale_window": section.loss_scale_window,
            "delayed_shift": section.hysteresis,
            "consecutive_hysteresis": section.consecutive_hysteresis,
            "min_scale": section.min_loss_scale,
        }

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        """The three getters themselves, as documented: (train batch, micro batch, accumulation steps)."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps  # type: ignore[attr-defined]


def _getter(name: str, path: str) -> Any:
    parts = path.split(".")

    def getter(self: EngineAccessors) -> Any:
        value: Any = self._config
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        return value

    getter.__name__ = getter.__qualname__ = name
    getter.__doc__ = f"Value of ``{path}`` in the configuration."
    return getter


for _name, _path in _ACCESSORS.items():
    setattr(EngineAccessors, _name, _getter(_name, _path))
