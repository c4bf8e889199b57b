"""`deepspeed.utils`: documented helpers. The import hook resolves those that live elsewhere (`aliases.py`)."""

from __future__ import annotations

import importlib

from deepspeed.base.logging import log_dist, log_dist_once, logger, set_log_level_from_string, warning_once
from deepspeed.compat.aliases import NAMES, SUBMODULES

# Not lazily: the function has its module's name, and a later import of the module would overwrite it.
importlib.import_module("deepspeed.utils.z3_leaf_module")
from deepspeed.zero.gathering.leaf_modules import z3_leaf_module  # noqa: E402

__all__ = [
    "log_dist", "log_dist_once", "logger", "set_log_level_from_string", "warning_once", "z3_leaf_module",
]  # fmt: skip
__all__ += [*NAMES["deepspeed.utils"], *SUBMODULES["deepspeed.utils"]]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
