"""Compiling the module of an engine at stages 1 and 2 with a schedule of passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.config.sections.compile import CompileConfig


def init_z1_and_2(
    engine: Any,
    backend: str,
    compile_config: CompileConfig,
    compile_kwargs: Mapping[str, Any],
    schedule: Any = None,
    use_z2: bool = False,
) -> Any:
    """Let ``engine`` follow ``schedule`` (default: that of its stage) from now on; returns the backend for
    ``torch.compile``. ``engine.compile`` does this and compiles.

    ValueError: the engine is not at stage 1 (``use_z2``: 2), or the schedule is not one.
    """
    stage, wanted = engine.zero_optimization_stage(), 2 if use_z2 else 1
    if stage != wanted:
        raise ValueError(
            f"init_z1_and_2(use_z2={use_z2}): zero_optimization.stage is {stage}, not {wanted}: use engine.compile()"
        )
    return engine.follow_passes(backend, compile_config, compile_kwargs, schedule)
