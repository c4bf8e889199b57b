"""Compiling the module of an engine at stage 3 with a schedule of passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.config.sections.model import CompileConfig
from deepspeed.transforms.compile.schedule import WARMUP

__all__ = ["WARMUP", "init_z3"]


def init_z3(
    engine: Any,
    backend: str,
    compile_config: CompileConfig,
    compile_kwargs: Mapping[str, Any],
    schedule: Any = None,
) -> Any:
    """Let ``engine`` follow ``schedule`` (default: that of stage 3) from now on; returns the backend for
    ``torch.compile``. ``engine.compile`` does this and compiles.

    ValueError: the engine is at another stage, or the schedule is not one.
    """
    stage = engine.zero_optimization_stage()
    if stage != 3:
        raise ValueError(f"init_z3: zero_optimization.stage is {stage}, not 3: use engine.compile()")
    return engine.follow_passes(backend, compile_config, compile_kwargs, schedule)
