"""Names of the section `flops_profiler`. Each key has two constants, its spelling and its default:
`FLOPS_PROFILER_TOP_MODULES` is "top_modules", `FLOPS_PROFILER_TOP_MODULES_DEFAULT` is 1.
"""

from __future__ import annotations

from typing import Any

from deepspeed.config.keys import constant_of
from deepspeed.config.sections.profiling import DeepSpeedFlopsProfilerConfig

FLOPS_PROFILER = "flops_profiler"


def __getattr__(name: str) -> Any:
    return constant_of(name, {"FLOPS_PROFILER": DeepSpeedFlopsProfilerConfig})
