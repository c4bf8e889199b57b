"""Compilation of a stage-3 engine's module with a schedule of passes."""

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
    """Set the pass ``schedule`` of ``engine`` (default: that of stage 3) and return the backend for ``torch.compile``.
    ``engine.compile`` does this and compiles.

    ValueError: the engine is at another stage, or the schedule is invalid.
    """
    stage = engine.zero_optimization_stage()
    if stage != 3:
        raise ValueError(f"init_z3: zero_optimization.stage is {stage}, not 3: use engine.compile()")
    return engine.follow_passes(backend, compile_config, compile_kwargs, schedule)
