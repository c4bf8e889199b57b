"""Stage 3: parameters are gathered before a compiled block and released after it."""

from __future__ import annotations

from typing import Any

NAME = "zero3_compile"


def add_z3_gather_release(
    gm: Any,
    graph_id: int,
    graph_order: Any,
    profiling_results: Any,
    create_inputs_fn: Any,
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> Any:
    """In a schedule: gather and release around each block, which is what stage 3 does in any case. ``gm`` is returned
    as it is (Note: settings, not rewriting)."""
    return gm
