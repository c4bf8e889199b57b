"""Stages 1 and 2: gradients are summed over the ranks while backward runs."""

from __future__ import annotations

from typing import Any

NAME = "zero1_compile"
NAME_Z2 = "zero2_compile"


def add_z1_reduce(
    gm: Any,
    graph_id: int,
    graph_order: Any,
    profiling_results: Any,
    create_inputs_fn: Any,
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> Any:
    """In a schedule: sum gradients as stage 1 does in any case. ``gm`` is returned as it is (Note: settings, not
    rewriting)."""
    return gm


def add_z2_reduce(
    gm: Any,
    graph_id: int,
    graph_order: Any,
    profiling_results: Any,
    create_inputs_fn: Any,
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> Any:
    """The same for stage 2."""
    return gm
