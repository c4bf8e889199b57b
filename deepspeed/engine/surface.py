"""Methods of the engine that its parts implement, in one list. ``engine.py`` holds what the engine does itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import not_
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from deepspeed.engine.parts.accumulation import Accumulation, SparseSums, ZeroGrads
from deepspeed.engine.parts.compiling import Compilation
from deepspeed.engine.parts.data import EngineData
from deepspeed.engine.parts.facts import EngineFacts
from deepspeed.engine.parts.state import Checkpoints, StateMoves

if TYPE_CHECKING:
    from deepspeed.transforms.progressive_layer_drop import ProgressiveLayerDrop


# Getters of config values: ``engine.zero_optimization_stage()`` returns ``config.zero_optimization_stage``.

_V = TypeVar("_V")


@overload
def setting(path: str) -> Callable[[Any], Any]: ...
@overload
def setting(
    path: str, kind: Callable[[Any], _V], derive: Callable[[Any], _V] | None = None
) -> Callable[[Any], _V]: ...
def setting(path: str, kind: Any = None, derive: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Make a method of the engine that returns the value at ``path`` in its ``DeepSpeedConfig``.

    Args:
        path: attributes or dict keys, joined by dots. If a section on the path is missing, the value is None.
        kind: return type of the method, for type checkers; default: any.
        derive: computes the returned value from that of the config; default: the identity.
    """
    parts = path.split(".")

    def getter(self: Any) -> Any:
        value = self._config
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        return value if derive is None else derive(value)

    getter.__doc__ = (
        f"Return {'the value' if derive is None else 'what follows from the value'} of ``{path}``."
    )
    return getter


class EngineSettings:
    """Getters of ``DeepSpeedEngine``: one row each, with the path of its value in the config."""

    _config: Any

    train_batch_size = setting("train_batch_size", int)
    train_micro_batch_size_per_gpu = setting("train_micro_batch_size_per_gpu", int)
    gradient_accumulation_steps = setting("gradient_accumulation_steps", int)
    managed_gradient_accumulation = setting("managed_gradient_accumulation", bool)
    steps_per_print = setting("steps_per_print")
    wall_clock_breakdown = setting("wall_clock_breakdown", bool)
    memory_breakdown = setting("memory_breakdown", bool)
    dump_state = setting("dump_state", bool)
    log_level = setting("log_level")
    dataloader_drop_last = setting("dataloader_drop_last", bool)

    optimizer_name = setting("optimizer_name")
    optimizer_params = setting("optimizer_params")
    optimizer_legacy_fusion = setting("optimizer_legacy_fusion", bool)
    scheduler_name = setting("scheduler_name")
    scheduler_params = setting("scheduler_params")
    gradient_clipping = setting("gradient_clipping", float)
    postscale_gradients = setting("prescale_gradients", bool, not_)
    gradient_predivide_factor = setting("gradient_predivide_factor", float)
    sparse_gradients_enabled = setting("sparse_gradients_enabled", bool)
    zero_allow_untested_optimizer = setting("zero_allow_untested_optimizer", bool)
    zero_force_ds_cpu_optimizer = setting("zero_force_ds_cpu_optimizer", bool)

    fp16_enabled = setting("float16_config.enabled", bool)
    fp16_auto_cast = setting("float16_config.auto_cast", bool)
    fp16_master_weights_and_gradients = setting("float16_config.fp16_master_weights_and_grads", bool)
    loss_scale = setting("float16_config.loss_scale", float)
    dynamic_loss_scale = setting("float16_config.loss_scale", bool, lambda scale: scale == 0)
    initial_dynamic_scale = setting("float16_config.initial_scale_power", float, lambda power: 2.0**power)
    bfloat16_enabled = setting("bfloat16_config.enabled", bool)
    bfloat16_master_weights_and_gradients = setting("bfloat16_config.bf16_master_weights_and_grads", bool)
    bfloat16_optimizer_states = setting("bfloat16_config.bf16_optimizer_states", bool)
    bf16_master_weights_and_gradients = setting("bfloat16_config.bf16_master_weights_and_grads", bool)
    bf16_optimizer_states = setting("bfloat16_config.bf16_optimizer_states", bool)
    amp_enabled = setting("amp.enabled", bool)
    amp_params = setting("amp.params")
    torch_autocast_enabled = setting("torch_autocast.enabled", bool)
    torch_autocast_dtype = setting("torch_autocast.dtype")
    torch_autocast_lower_precision_safe_modules = setting("torch_autocast.lower_precision_safe_modules")

    zero_optimization = setting("zero_enabled", bool)
    zero_optimization_stage = setting("zero_optimization_stage", int)
    zero_optimization_partition_gradients = setting("zero_optimization_stage", bool, lambda stage: stage >= 2)
    zero_optimization_partition_weights = setting("zero_optimization_stage", bool, lambda stage: stage >= 3)
    is_first_weights_partition_group = zero_optimization_partition_weights
    zero_offload_optimizer = setting("zero_config.offload_optimizer")
    zero_offload_param = setting("zero_config.offload_param")
    swap_tensor_config = zero_offload_param
    zero_cpu_offload = setting("zero_config.offload_optimizer.device", bool, lambda device: device == "cpu")
    zero_nvme_offload_optimizer = setting(
        "zero_config.offload_optimizer.device", bool, lambda device: device == "nvme"
    )
    zero_use_cpu_optimizer = setting(
        "zero_config.offload_optimizer.device", bool, lambda device: device not in (None, "none")
    )
    zero_partial_offload = setting(
        "zero_config.offload_optimizer.ratio", float, lambda ratio: 1.0 if ratio is None else ratio
    )
    cpuadam_cores_perc = setting(
        "zero_config.offload_optimizer.cpuadam_cores_perc", float, lambda perc: 0.9 if perc is None else perc
    )
    super_offload = setting("zero_config.offload_optimizer.super_offload", bool, bool)
    zero_reduce_bucket_size = setting("zero_config.reduce_bucket_size", int)
    zero_allgather_bucket_size = setting("zero_config.allgather_bucket_size", int)
    zero_multi_rank_bucket_allreduce = setting("zero_config.use_multi_rank_bucket_allreduce", bool)
    zero_overlap_comm = setting("zero_config.overlap_comm")
    zero_reduce_scatter = setting("zero_config.reduce_scatter", bool)
    zero_contiguous_gradients = setting("zero_config.contiguous_gradients", bool)
    zero_allgather_partitions = setting("zero_config.allgather_partitions", bool)
    zero_round_robin_gradients = setting("zero_config.round_robin_gradients", bool)
    zero_ignore_unused_parameters = setting("zero_config.ignore_unused_parameters", bool)
    zero_load_from_fp32_weights = setting("zero_config.load_from_fp32_weights", bool)
    zero_elastic_checkpoint = setting("zero_config.elastic_checkpoint", bool)
    zero_sub_group_size = setting("zero_config.sub_group_size", int)
    zero_prefetch_bucket_size = setting("zero_config.prefetch_bucket_size", int)
    zero_max_live_parameters = setting("zero_config.max_live_parameters", int)
    zero_max_reuse_distance = setting("zero_config.max_reuse_distance", int)
    zero_param_persistence_threshold = setting("zero_config.param_persistence_threshold", int)
    zero_model_persistence_threshold = setting("zero_config.model_persistence_threshold", int)
    zero_gather_16bit_weights_on_model_save = setting("zero_config.gather_16bit_weights_on_model_save", bool)
    zero_hpz_partition_size = setting("zero_config.zero_hpz_partition_size", int)
    zero_quantized_weights = setting("zero_config.zero_quantized_weights", bool)
    zero_quantized_nontrainable_weights = setting("zero_config.zero_quantized_nontrainable_weights", bool)
    zero_quantized_gradients = setting("zero_config.zero_quantized_gradients", bool)
    zero_legacy_stage1 = setting("zero_config.legacy_stage1", bool)
    zero_log_trace_cache_warnings = setting("zero_config.log_trace_cache_warnings", bool)
    zero_module_granularity_threshold = setting("zero_config.module_granularity_threshold", int)
    zero_allgather_sequential = setting("zero_config.allgather_sequential", bool)
    zero_save_muon_momentum_buffer_in_memory = setting(
        "zero_config.save_muon_momentum_buffer_in_memory", bool
    )
    zeropp_loco_param = setting("zero_config.zeropp_loco_param")
    is_sanity_checks_enabled = setting("zero_config.enable_sanity_checks", bool)
    zenflow_config = setting("zero_config.zenflow")
    mics_shard_size = setting("zero_config.mics_shard_size", int)

    aio_config = setting("aio_config")
    checkpoint_tag_validation_enabled = setting("checkpoint_tag_validation_enabled", bool)
    checkpoint_tag_validation_fail = setting("checkpoint_tag_validation_fail", bool)
    use_node_local_storage = setting("use_node_local_storage", bool)
    load_universal_checkpoint = setting("load_universal_checkpoint", bool)
    checkpoint_serialization_enabled = setting("checkpoint_config.checkpoint_serialization", bool)
    elasticity_enabled = setting("elasticity_enabled", bool)
    tensor_parallel_config = setting("tensor_parallel_config")
    autotp_size = setting("tensor_parallel_config.autotp_size", int)
    activation_checkpointing_config = setting("activation_checkpointing_config")
    graph_harvesting = setting("graph_harvesting", bool)
    pld_enabled = setting("pld_enabled", bool)
    pld_params = setting("pld_params")
    pld_theta = setting("pld_config.theta")
    pld_gamma = setting("pld_config.gamma")
    curriculum_enabled_legacy = setting("curriculum_enabled_legacy", bool)
    curriculum_params_legacy = setting("curriculum_params_legacy")
    data_efficiency_enabled = setting("data_efficiency_enabled", bool)
    data_efficiency_config = setting("data_efficiency_config")
    data_sampling_enabled = setting("data_efficiency_config.data_sampling.enabled", bool)
    data_sampling_config = setting("data_efficiency_config.data_sampling")
    curriculum_learning_enabled = setting(
        "data_efficiency_config.data_sampling.curriculum_learning.enabled", bool
    )
    curriculum_learning_config = setting("data_efficiency_config.data_sampling.curriculum_learning")
    random_ltd_enabled = setting("data_efficiency_config.data_routing.random_ltd.enabled", bool)
    random_ltd_config = setting("data_efficiency_config.data_routing.random_ltd")
    eigenvalue_enabled = setting("eigenvalue_config.enabled", bool, bool)
    eigenvalue_verbose = setting("eigenvalue_config.verbose")
    eigenvalue_max_iter = setting("eigenvalue_config.max_iter")
    eigenvalue_tol = setting("eigenvalue_config.tol")
    eigenvalue_stability = setting("eigenvalue_config.stability")
    eigenvalue_gas_boundary_resolution = setting("eigenvalue_config.gas_boundary_resolution")
    eigenvalue_layer_name = setting("eigenvalue_config.layer_name")
    eigenvalue_layer_num = setting("eigenvalue_config.layer_num")
    flops_profiler_enabled = setting("flops_profiler_config.enabled", bool)
    flops_profiler_profile_step = setting("flops_profiler_config.profile_step", int)
    flops_profiler_module_depth = setting("flops_profiler_config.module_depth", int)
    flops_profiler_top_modules = setting("flops_profiler_config.top_modules", int)
    flops_profiler_detailed = setting("flops_profiler_config.detailed", bool)
    flops_profiler_output_file = setting("flops_profiler_config.output_file")
    flops_profiler_recompute_fwd_factor = setting("flops_profiler_config.recompute_fwd_factor", float)
    autotuning_enabled = setting("autotuning_config.enabled", bool)
    autotuning_start_profile_step = setting("autotuning_config.start_profile_step", int)
    autotuning_end_profile_step = setting("autotuning_config.end_profile_step", int)
    autotuning_metric = setting("autotuning_config.metric", str)
    autotuning_metric_path = setting("autotuning_config.metric_path")
    autotuning_model_info_path = setting("autotuning_config.model_info_path")
    autotuning_profile_model_info = setting("autotuning_config.model_info.profile")

    def is_elastic_model_parallel_supported(self) -> bool:
        """Return whether elasticity is on in version 0.2, which supports model-parallel ranks."""
        section = self._config.elasticity_config
        return section is not None and section.enabled and section.version == 0.2

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the arguments of the dynamic loss scaler."""
        return self._config.float16_config.dynamic_loss_scale_args()

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        """Return three getters, as documented: of the train batch, the micro-batch and the accumulation steps."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps


for _name, _method in list(vars(EngineSettings).items()):
    if getattr(_method, "__name__", "") == "getter":
        _method.__name__, _method.__qualname__ = _name, f"EngineSettings.{_name}"


_P = ParamSpec("_P")
_R = TypeVar("_R")


PARTS = {
    EngineFacts: "facts",
    Accumulation: "accumulation",
    ZeroGrads: "zero_grads",
    EngineData: "data",
    Compilation: "compilation",
    Checkpoints: "checkpoints",
    SparseSums: "sparse_sums",
    StateMoves: "moves",
}
"""Engine attribute that holds the part of each class."""
_PART_OF = {kind.__name__: attribute for kind, attribute in PARTS.items()}


def implemented_by(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Make an engine method with the signature and docstring of ``method``, which is called on the engine's part of
    that class: ``compile = implemented_by(Compilation.compile)``."""
    part, name = _PART_OF[method.__qualname__.split(".")[0]], method.__name__

    @functools.wraps(method)
    def answer(engine: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return getattr(getattr(engine, part), name)(*args, **kwargs)

    return answer


class PartAttribute(Generic[_R]):
    """An engine attribute that reads and writes the attribute of the same name of its part ``part``."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self.__doc__ = f"``{name}`` of ``engine.{self._part}``."

    def __get__(self, engine: Any, kind: Any = None) -> _R:
        return self if engine is None else getattr(getattr(engine, self._part), self._name)  # type: ignore[return-value]

    def __set__(self, engine: Any, value: _R) -> None:
        setattr(getattr(engine, self._part), self._name, value)


def _along(axis: str) -> tuple[Callable[[Any], int], Callable[[Any], int]]:
    """Make two methods of the engine: this rank's index along ``axis`` of the mesh, and the number of ranks."""
    return lambda self: self.mesh.rank(axis), lambda self: self.mesh.size(axis)


class EngineSurface(EngineSettings):
    """Documented members of ``DeepSpeedEngine`` that its parts implement; config getters are inherited."""

    get_global_grad_norm = implemented_by(EngineFacts.get_global_grad_norm)
    was_step_applied = implemented_by(EngineFacts.was_step_applied)
    get_lr = implemented_by(EngineFacts.get_lr)
    get_type = implemented_by(EngineFacts.get_type)
    get_mom = implemented_by(EngineFacts.get_mom)
    get_wall_clock_timers = implemented_by(EngineFacts.get_wall_clock_timers)
    micro_steps = PartAttribute[int]("clock")
    position_in_batch = implemented_by(EngineFacts.position_in_batch)
    progressive_layer_drop: PartAttribute[ProgressiveLayerDrop | None] = PartAttribute("facts")
    get_pld_theta = implemented_by(EngineFacts.get_pld_theta)
    get_data_types = implemented_by(EngineFacts.get_data_types)
    sparse_tensor_module_names = PartAttribute[set[str]]("facts")
    communication_data_type = PartAttribute[torch.dtype]("facts")
    gradient_average = PartAttribute[bool]("facts")
    data_parallel_group = property(lambda engine: engine.mesh.group("dp"))
    seq_data_parallel_group = property(lambda engine: engine.mesh.group("dp", "sp"))
    seq_parallel_group = property(lambda engine: engine.mesh.group("sp"))
    expert_parallel_group = PartAttribute[dict[str, Any]]("facts")
    expert_data_parallel_group = PartAttribute[dict[str, Any]]("facts")

    def get_sequence_parallel_group(self) -> Any:
        """Return the process group of the ranks that share each sequence."""
        return self.seq_parallel_group

    get_data_parallel_rank, get_data_parallel_world_size = _along("dp")
    get_model_parallel_rank, get_model_parallel_world_size = _along("tp")
    get_tensor_parallel_rank, get_tensor_parallel_world_size = _along("tp")
    get_sequence_parallel_rank, get_sequence_parallel_world_size = _along("sp")
    get_pipeline_parallel_rank, get_pipeline_parallel_world_size = _along("pp")

    is_gradient_accumulation_boundary = implemented_by(Accumulation.is_gradient_accumulation_boundary)
    set_gradient_accumulation_boundary = implemented_by(Accumulation.set_gradient_accumulation_boundary)
    no_sync = implemented_by(Accumulation.no_sync)
    coalesce_grad_reduction = implemented_by(Accumulation.coalesce_grad_reduction)
    allreduce_gradients = implemented_by(Accumulation.allreduce_gradients)
    clip_fp32_gradients = implemented_by(Accumulation.clip_fp32_gradients)
    zero_grad = implemented_by(ZeroGrads.zero_grad)
    set_all_reduce_hook = implemented_by(Accumulation.set_all_reduce_hook)
    set_train_batch_size = implemented_by(Accumulation.set_train_batch_size)
    set_train_micro_batch_size = implemented_by(Accumulation.set_train_micro_batch_size)

    deepspeed_io = implemented_by(EngineData.deepspeed_io)
    set_data_post_process_func = implemented_by(EngineData.set_data_post_process_func)
    set_custom_curriculum_learning_schedule = implemented_by(
        EngineData.set_custom_curriculum_learning_schedule
    )
    add_input_transform = implemented_by(EngineData.add_input_transform)
    remove_input_transform = implemented_by(EngineData.remove_input_transform)
    random_ltd_initialize = implemented_by(EngineData.random_ltd_initialize)

    compile = implemented_by(Compilation.compile)  # type: ignore[assignment]
    is_compiled = PartAttribute[bool]("compilation")
    follow_passes = implemented_by(Compilation.follow_passes)
    register_compile_pass = implemented_by(Compilation.register_compile_pass)
    get_compile_time = implemented_by(Compilation.get_compile_time)
    is_deepcompile_enabled = implemented_by(Compilation.is_deepcompile_enabled)
    is_deepcompile_active = implemented_by(Compilation.is_deepcompile_active)

    save_checkpoint = implemented_by(Checkpoints.save_checkpoint)
    store_checkpoint = save_checkpoint
    load_checkpoint = implemented_by(Checkpoints.load_checkpoint)
    save_non_zero_checkpoint = PartAttribute[bool]("checkpoints")
    save_zero_checkpoint = PartAttribute[bool]("checkpoints")
    save_16bit_model = implemented_by(Checkpoints.save_16bit_model)
    save_fp16_model = implemented_by(Checkpoints.save_fp16_model)
    module_state_dict = implemented_by(Checkpoints.module_state_dict)
    load_module_state_dict = implemented_by(Checkpoints.load_module_state_dict)
    layer_writer = implemented_by(Checkpoints.layer_writer)
    of_all_stages = implemented_by(Checkpoints.of_all_stages)
    whole_tensor = implemented_by(Checkpoints.whole_tensor)
    _consolidated_16bit_state_dict = implemented_by(Checkpoints._consolidated_16bit_state_dict)
    _zero3_consolidated_16bit_state_dict = implemented_by(Checkpoints._zero3_consolidated_16bit_state_dict)
    _get_ckpt_name = implemented_by(Checkpoints._get_ckpt_name)
    _get_all_ckpt_names = implemented_by(Checkpoints._get_all_ckpt_names)
    _get_zero_ckpt_name = implemented_by(Checkpoints._get_zero_ckpt_name)
    _get_optimizer_ckpt_name = implemented_by(Checkpoints._get_optimizer_ckpt_name)
    _change_recovery_script_permissions = implemented_by(Checkpoints._change_recovery_script_permissions)

    all_gather_scalar = implemented_by(SparseSums.all_gather_scalar)
    sparse_all_gather = implemented_by(SparseSums.sparse_all_gather)
    sparse_allreduce = implemented_by(SparseSums.sparse_allreduce)
    sparse_allreduce_bucket = implemented_by(SparseSums.sparse_allreduce_bucket)
    sparse_allreduce_no_retain = implemented_by(SparseSums.sparse_allreduce_no_retain)

    offload_states = implemented_by(StateMoves.offload_states)
    reload_states = implemented_by(StateMoves.reload_states)
    empty_partition_cache = implemented_by(StateMoves.empty_partition_cache)
    collect_python_gc = implemented_by(StateMoves.collect_python_gc)
