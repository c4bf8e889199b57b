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
HOMES}
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
