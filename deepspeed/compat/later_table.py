"""Signatures of documented names that come later, by module; `later.py` explains the lines.

What clients are known to import is listed here, the rest of the documented interface in `later_names.txt`.
"""

from __future__ import annotations

import os

# Path prefix -> what to do until then. The longest match is quoted in the refusal.
INSTEAD = {
    "deepspeed.checkpoint": "load_checkpoint() takes a checkpoint of any world size and stage, without conversion.",
    "deepspeed.checkpoint.autoep": "Checkpoints hold whole experts: any number of ranks loads them.",
    "deepspeed.comm": "Communication here is torch.distributed; deepspeed.comm has its functions.",
    "deepspeed.compile": "engine.compile() runs passes over graphs; see docs/compile.md.",
    "deepspeed.datastates": "datastates_ckpt in the config makes engine.save_checkpoint() write in the background.",
    "deepspeed.env_report": "ds_report prints what is known about the device and its libraries.",
    "deepspeed.inference": "deepspeed.init_inference and build_hf_engine make all parts of their engines.",
    "deepspeed.io": "The writers of deepspeed.io manage their buffers themselves.",
    "deepspeed.model_implementations": "deepspeed.init_inference runs models as they are.",
    "deepspeed.module_inject": "init_inference and tensor_parallel.autotp_size find a model's layers by its graph.",
    "deepspeed.module_inject.auto_ep": "The config section expert_parallel spreads experts over ranks.",
    "deepspeed.moe": "The config section expert_parallel spreads the experts of Transformers models over ranks.",
    "deepspeed.nvme": "The commands ds_io and ds_nvme_tune measure and tune file access.",
    "deepspeed.ops.adam": "Use ZenFlowSelectiveAdamW; the engine's own serves every stage.",
    "deepspeed.ops.fp_quantizer": "Use deepspeed.ops.fp_quantizer.matmul_fp8.",
    "deepspeed.ops.op_builder": "Nothing is compiled at run time here: a builder's load() returns what is installed.",
    "deepspeed.ops.transformer": "Use DeepSpeedTransformerLayer.",
    "deepspeed.ops.transformer.inference": "deepspeed.init_inference runs models with kernels of its own.",
    "deepspeed.runtime.activation_checkpointing": "deepspeed.checkpointing.configure() and checkpoint() do this.",
    "deepspeed.runtime.base_optimizer": "Gradients are reduced by hooks of the engine; plain loss.backward() works.",
    "deepspeed.runtime.checkpoint_engine": "engine.save_checkpoint() does this, as checkpoint.writer says.",
    "deepspeed.runtime.comm": "CompressedBackend works on every process group; see also deepspeed.comm.",
    "deepspeed.runtime.compiler": "Use torch.compiler, or engine.compile().",
    "deepspeed.runtime.compression": "CompressedBackend of deepspeed.runtime.comm needs no CuPy.",
    "deepspeed.runtime.engine": "deepspeed.initialize() makes all parts of an engine.",
    "deepspeed.runtime.model_checkpointing": "deepspeed.check_config reads and checks the section checkpoint.",
    "deepspeed.runtime.swap_tensor": "offload_optimizer and offload_param with device nvme do this.",
    "deepspeed.runtime.tensor_parallel": "Set tensor_parallel.autotp_size in the config, or call tp_model_init().",
    "deepspeed.runtime.torch_autocast": "Set torch_autocast.enabled in the config; the engine does the rest.",
    "deepspeed.runtime.utils": "The engine does this itself; training scripts have no need of it.",
    "deepspeed.runtime.zenflow": "The engine does this itself with zero_optimization.zenflow in the config.",
    "deepspeed.runtime.zero": "Use deepspeed.zero.GatheredParameters and deepspeed.utils.safe_get_full_fp32_param.",
    "deepspeed.utils.mixed_precision_linkage": "Engines link by themselves; see safe_get_full_fp32_param.",
    "deepspeed.utils.tensor_fragment": "Use deepspeed.utils.safe_get_full_fp32_param and its siblings.",
    "deepspeed.utils.zero_to_fp32": "Use get_fp32_state_dict_from_zero_checkpoint().",
}

LATER: dict[str, tuple[str, ...]] = {
    "deepspeed.runtime.torch_autocast": ("def is_autocast_initialized()",),
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
