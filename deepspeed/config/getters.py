"""Documented functions that read one setting from a config dict as written: `get_gradient_clipping(param_dict)`.

A missing key has its documented default, taken from the schema. Nothing is validated here; `DeepSpeedConfig`
does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deepspeed.base.dtypes import torch_dtype
from deepspeed.config.keys import constant_of, field_at, keys_of
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.section import parse_dtype, parse_sum_dtype
from deepspeed.config.sections.hybrid_engine import HybridEngineConfig

COMMUNICATION_DATA_TYPE = "communication_data_type"
COMMUNICATION_DATA_TYPE_DEFAULT = None


def schema_default(*path: str) -> Any:
    """The documented default of a key; for a section, a dict of its keys' defaults."""
    field = field_at(TrainingConfig, path)
    assert field is not None, path
    value = field.get_default(call_default_factory=True)
    return None if value is PydanticUndefined else as_written(value)


def constant_of_key(name: str) -> Any:
    """`GRADIENT_CLIPPING`: the spelling of a top-level key; `GRADIENT_CLIPPING_DEFAULT`: its documented default.
    `FP16_HYSTERESIS` and `FP16_HYSTERESIS_DEFAULT`: the same of a key of a section.

    AttributeError for any other name.
    """
    spellings = {key.upper(): key for key in keys_of(TrainingConfig)}
    key = name.removesuffix("_DEFAULT")
    if key in spellings:
        return spellings[key] if key == name else schema_default(spellings[key])
    sections = {prefix: keys_of(TrainingConfig)[own].section for prefix, own in _PREFIXES.items()}
    return constant_of(name, {prefix: section for prefix, section in sections.items() if section})


_PREFIXES = {
    "FP16": "fp16",
    "BFLOAT16": "bf16",
    "TORCH_AUTOCAST": "torch_autocast",
    "CHECKPOINT": "checkpoint",
    "ACT_CHKPT": "activation_checkpointing",
    "PLD": "progressive_layer_drop",
}
"""Prefix of constants -> section."""


def as_written(value: Any) -> Any:
    """A section as the dict that a user would write, under documented spellings."""
    if isinstance(value, Enum):
        return value.value
    if not isinstance(value, BaseModel):
        return value
    table = keys_of(type(value))
    spelling = {key.name: name for name, key in reversed(table.items())}
    return {spelling[name]: as_written(getattr(value, name)) for name in type(value).model_fields}


def read(param_dict: Mapping[str, Any], *path: str) -> Any:
    """The value at a path of a config, or its default."""
    found: Any = param_dict
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return schema_default(*path)
        found = found[key]
    return found


def _getter(name: str, *path: str) -> Callable[[Mapping[str, Any]], Any]:
    def get(param_dict: Mapping[str, Any]) -> Any:
        return read(param_dict, *path)

    get.__name__ = get.__qualname__ = name
    get.__doc__ = f"`{'.'.join(path)}` of a config."
    return get


get_gradient_accumulation_steps = _getter("get_gradient_accumulation_steps", "gradient_accumulation_steps")
get_managed_gradient_accumulation = _getter(
    "get_managed_gradient_accumulation", "managed_gradient_accumulation"
)
get_sparse_gradients_enabled = _getter("get_sparse_gradients_enabled", "sparse_gradients")
get_prescale_gradients = _getter("get_prescale_gradients", "prescale_gradients")
get_gradient_predivide_factor = _getter("get_gradient_predivide_factor", "gradient_predivide_factor")
get_gradient_allreduce_op = _getter("get_gradient_allreduce_op", "gradient_allreduce_op")
get_steps_per_print = _getter("get_steps_per_print", "steps_per_print")
get_disable_allgather = _getter("get_disable_allgather", "disable_allgather")
get_dump_state = _getter("get_dump_state", "dump_state")
get_disable_python_gc = _getter("get_disable_python_gc", "disable_python_gc")
get_gradient_clipping = _getter("get_gradient_clipping", "gradient_clipping")
get_graph_harvesting = _getter("get_graph_harvesting", "graph_harvesting")
get_train_batch_size = _getter("get_train_batch_size", "train_batch_size")
get_train_micro_batch_size_per_gpu = _getter(
    "get_train_micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"
)
get_wall_clock_breakdown = _getter("get_wall_clock_breakdown", "wall_clock_breakdown")
get_memory_breakdown = _getter("get_memory_breakdown", "memory_breakdown")
get_dataloader_drop_last = _getter("get_dataloader_drop_last", "dataloader_drop_last")
get_zero_allow_untested_optimizer = _getter(
    "get_zero_allow_untested_optimizer", "zero_allow_untested_optimizer"
)
get_zero_force_ds_cpu_optimizer = _getter("get_zero_force_ds_cpu_optimizer", "zero_force_ds_cpu_optimizer")
get_expert_data_topo_config = _getter("get_expert_data_topo_config", "use_data_before_expert_parallelism")
get_expert_parallel_config = _getter("get_expert_parallel_config", "expert_parallel")
get_pipeline_config = _getter("get_pipeline_config", "pipeline")
get_log_level = _getter("get_log_level", "log_level")
get_amp_enabled = _getter("get_amp_enabled", "amp", "enabled")
get_torch_autocast_enabled = _getter("get_torch_autocast_enabled", "torch_autocast", "enabled")
get_lower_precision_safe_modules = _getter(
    "get_lower_precision_safe_modules", "torch_autocast", "lower_precision_safe_modules"
)
get_optimizer_name = _getter("get_optimizer_name", "optimizer", "type")
get_optimizer_params = _getter("get_optimizer_params", "optimizer", "params")
get_optimizer_legacy_fusion = _getter("get_optimizer_legacy_fusion", "optimizer", "legacy_fusion")
get_scheduler_name = _getter("get_scheduler_name", "scheduler", "type")
get_scheduler_params = _getter("get_scheduler_params", "scheduler", "params")
get_checkpoint_params = _getter("get_checkpoint_params", "checkpoint")
get_data_types_params = _getter("get_data_types_params", "data_types")
get_eigenvalue_config = _getter("get_eigenvalue_config", "quantize_training", "eigenvalue")


# Functions that take a single section.


def get_eigenvalue_enabled(param_dict: Mapping[str, Any]) -> bool:
    """Tell whether a config asks for eigenvalues of the layers."""
    return bool(_eigenvalue(param_dict, "enabled"))


def get_eigenvalue_verbose(param_dict: Mapping[str, Any]) -> bool:
    return _eigenvalue(param_dict, "verbose")


def get_eigenvalue_max_iter(param_dict: Mapping[str, Any]) -> int:
    return _eigenvalue(param_dict, "max_iter")


def get_eigenvalue_tol(param_dict: Mapping[str, Any]) -> float:
    return _eigenvalue(param_dict, "tol")


def get_eigenvalue_stability(param_dict: Mapping[str, Any]) -> float:
    return _eigenvalue(param_dict, "stability")


def get_eigenvalue_gas_boundary_resolution(param_dict: Mapping[str, Any]) -> int:
    return _eigenvalue(param_dict, "gas_boundary_resolution")


def get_eigenvalue_layer_name(param_dict: Mapping[str, Any]) -> str:
    return _eigenvalue(param_dict, "layer_name")


def get_eigenvalue_layer_num(param_dict: Mapping[str, Any]) -> int:
    return _eigenvalue(param_dict, "layer_num")


def _eigenvalue(param_dict: Mapping[str, Any], key: str) -> Any:
    return read(param_dict, "quantize_training", "eigenvalue", key)


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> str:
    """`tag_validation` of a `checkpoint` section, in capitals: IGNORE, WARN or FAIL."""
    return str(read({"checkpoint": checkpoint_params}, "checkpoint", "tag_validation")).upper()


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Mapping[str, Any]) -> bool:
    return read({"checkpoint": checkpoint_params}, "checkpoint", "parallel_write", "pipeline_stage")


# Settings that are more than a value at a path.


def _arguments(param_dict: Mapping[str, Any], section: str) -> dict[str, Any] | None:
    """Return the keys of a section without its switch `enabled`; None if the config has no such section."""
    if section not in param_dict:
        return None
    return {key: value for key, value in param_dict[section].items() if key != "enabled"}


def get_amp_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    return _arguments(param_dict, "amp")


def get_pld_enabled(param_dict: Mapping[str, Any]) -> bool:
    """Tell whether a config turns progressive layer dropping on."""
    return bool(read(param_dict, "progressive_layer_drop", "enabled"))


def get_pld_params(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    return _arguments(param_dict, "progressive_layer_drop")


def get_torch_autocast_dtype(param_dict: Mapping[str, Any]) -> Any:
    """`torch_autocast.dtype` as a torch dtype, or None if it is not given."""
    return torch_dtype(parse_dtype(read(param_dict, "torch_autocast", "dtype")))


def get_communication_data_type(
    param_dict: Mapping[str, Any],
    comm_type: str = COMMUNICATION_DATA_TYPE,
    comm_data_type_default: Any = COMMUNICATION_DATA_TYPE_DEFAULT,
) -> Any:
    """The dtype under the key `comm_type`: the wire dtype of gradients. None: the training dtype."""
    return torch_dtype(parse_sum_dtype(param_dict.get(comm_type, comm_data_type_default)))


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> float | None:
    """`max_grad_norm` among the optimizer's arguments, an old place for `gradient_clipping`."""
    return (get_optimizer_params(param_dict) or {}).get("max_grad_norm")


def get_hybrid_engine_config(param_dict: Mapping[str, Any]) -> HybridEngineConfig:
    """The `hybrid_engine` section, validated."""
    return HybridEngineConfig(**read(param_dict, "hybrid_engine"))


_LAYOUT = ("block", "different_layout_per_head")
_DIRECTED = ("attention", "horizontal_global_attention")
_BLOCKS_SEEN = ("global_block_indices", "global_block_end_indices")
_SPARSITY_KEYS = {
    "dense": ("block",),
    "fixed": (
        *_LAYOUT,
        "num_local_blocks",
        "num_global_blocks",
        *_DIRECTED,
        "num_different_global_patterns",
    ),
    "variable": (*_LAYOUT, "num_random_blocks", "local_window_blocks", *_BLOCKS_SEEN, *_DIRECTED),
    "bigbird": (*_LAYOUT, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"),
    "bslongformer": (*_LAYOUT, "num_sliding_window_blocks", *_BLOCKS_SEEN),
}


def get_sparse_attention(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the keys of `sparse_attention` that its mode uses, with defaults; None without the section."""
    sparsity = param_dict.get("sparse_attention")
    return None if sparsity is None else _sparsity(sparsity, get_sparse_attention_mode(sparsity))


def _sparsity(sparsity: Mapping[str, Any], mode: str) -> dict[str, Any]:
    if mode not in _SPARSITY_KEYS:
        raise NotImplementedError(
            f"sparse_attention.mode={mode!r} is unknown: use one of {', '.join(_SPARSITY_KEYS)}"
        )
    section = {"sparse_attention": sparsity}
    return {"mode": mode} | {key: read(section, "sparse_attention", key) for key in _SPARSITY_KEYS[mode]}


def get_sparse_dense_config(sparsity: Mapping[str, Any]) -> dict[str, Any]:
    return _sparsity(sparsity, "dense")


def get_sparse_fixed_config(sparsity: Mapping[str, Any]) -> dict[str, Any]:
    return _sparsity(sparsity, "fixed")


def get_sparse_variable_config(sparsity: Mapping[str, Any]) -> dict[str, Any]:
    return _sparsity(sparsity, "variable")


def get_sparse_bigbird_config(sparsity: Mapping[str, Any]) -> dict[str, Any]:
    return _sparsity(sparsity, "bigbird")


def get_sparse_bslongformer_config(sparsity: Mapping[str, Any]) -> dict[str, Any]:
    return _sparsity(sparsity, "bslongformer")


def get_sparse_attention_mode(param_dict: Mapping[str, Any]) -> str:
    """`mode` of a `sparse_attention` section, passed by itself."""
    return read({"sparse_attention": param_dict}, "sparse_attention", "mode")


def get_sparse_attention_type(param_dict: Mapping[str, Any]) -> str:
    """`attention` of a `sparse_attention` section: unidirectional or bidirectional."""
    return read({"sparse_attention": param_dict}, "sparse_attention", "attention")
