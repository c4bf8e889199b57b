"""`deepspeed.utils`: documented helpers, each resolved on first use where it lives."""

from __future__ import annotations

import importlib
from typing import Any

from deepspeed.base.logging import log_dist, log_dist_once, logger, set_log_level_from_string, warning_once

# Not lazily: the function has its module's name, and importing the module later would replace it with the
# module.
importlib.import_module("deepspeed.utils.z3_leaf_module")
from deepspeed.zero.gathering.leaf_modules import z3_leaf_module  # noqa: E402

# module -> documented names that it defines
_HOMES = {
    "deepspeed.data.loader": ("RepeatingLoader",),
    "deepspeed.comm.record": ("get_caller_func",),
    "deepspeed.base.exceptions": ("DeprecatedException",),
    "deepspeed.comm.documented_groups": (
        "get_data_parallel_group",
        "get_data_parallel_rank",
        "get_data_parallel_world_size",
        "get_model_parallel_group",
        "get_model_parallel_rank",
        "get_model_parallel_world_size",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_src_rank",
        "get_tensor_model_parallel_world_size",
        "initialize",
        "set_tensor_model_parallel_rank",
        "set_tensor_model_parallel_world_size",
    ),
    "deepspeed.transforms.on_device": ("OnDevice",),
    "deepspeed.base.numa": ("get_numactl_cmd",),
    "deepspeed.compat.utils.nvtx": ("instrument_w_nvtx",),
    "deepspeed.zero.tensor_fragment": (
        "get_full_hp_grad",
        "get_full_hp_param",
        "safe_get_full_fp32_param",
        "safe_get_full_grad",
        "safe_get_full_optimizer_state",
        "safe_get_local_fp32_param",
        "safe_get_local_grad",
        "safe_get_local_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_grad",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_grad",
        "safe_set_local_optimizer_state",
        "safe_update_full_grad_vectorized",
        "set_full_hp_grad",
        "set_full_hp_param",
    ),
    "deepspeed.zero.gathering.leaf_modules": (
        "apply_zero_leaf_module_config",
        "get_z3_leaf_modules",
        "set_z3_leaf_module",
        "set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules",
        "z3_leaf_parameter",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBMODULES = ("debug", "groups", "memory", "numa", "nvtx", "tensor_fragment", "timer", "zero_to_fp32")

__all__ = ["log_dist", "log_dist_once", "logger", "set_log_level_from_string", "warning_once"]
__all__ += ["z3_leaf_module"]
__all__ += [*_HOME_OF, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"deepspeed.utils.{name}")
    else:
        raise AttributeError(f"module 'deepspeed.utils' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
