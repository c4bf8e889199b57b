"""Stage 3: what the next blocks need is gathered ahead of its use."""

from __future__ import annotations

from typing import Any

NAME = "prefetch"


def schedule_prefetch(
    gm: Any,
    graph_id: int,
    graph_order: Any,
    profiling_results: Any,
    create_inputs_fn: Any,
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> Any:
    """In a schedule: from this step on, gather ahead as far as ``stage3_prefetch_bucket_size`` allows; a step without
    this pass gathers nothing ahead. ``gm`` is returned as it is (Note: settings, not rewriting)."""
    return gm
