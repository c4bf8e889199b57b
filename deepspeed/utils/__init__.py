"""Small helpers that the rest of the package builds on. Names are resolved on first use."""

from __future__ import annotations

import importlib
from typing import Any

from .logging import log_dist, log_dist_once, logger, set_log_level_from_string, warning_once

# Not lazily: the function has its module's name, and importing the module later would replace it with the
# module.
from .z3_leaf_module import z3_leaf_module

# module below deepspeed -> documented names that it defines
_HOMES = {
    "runtime.dataloader": ("RepeatingLoader",),
    "utils.comms_logging": ("get_caller_func",),
    "utils.exceptions": ("DeprecatedException",),
    "utils.groups": (
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
    "utils.init_on_device": ("OnDevice",),
    "utils.numa": ("get_numactl_cmd",),
    "utils.nvtx": ("instrument_w_nvtx",),
    "utils.tensor_fragment": (
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
    "utils.z3_leaf_module": (
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
        value = getattr(importlib.import_module(f"deepspeed.{_HOME_OF[name]}"), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
