"""The optimizer's states are in host memory except while it updates."""

from __future__ import annotations

from typing import Any

NAME = "offload_adam_states"
NAME_SYNC = "offload_adam_states_sync"
NAME_INIT = "offload_adam_states_for_init"


def move_opt_states(
    gm: Any,
    graph_id: int,
    graph_order: Any,
    profiling_results: Any,
    create_inputs_fn: Any,
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> Any:
    """In a schedule: from this step on, master weights and optimizer states leave the device after each update and come
    back before the next one; the copies do not wait. ``gm`` is returned as it is (Note: settings, not rewriting)."""
    return gm


def move_opt_states_sync(
    gm: Any,
    graph_id: int,
    graph_order: Any,
    profiling_results: Any,
    create_inputs_fn: Any,
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> Any:
    """The same, with copies that are waited for."""
    return gm


def offload_adam_states_for_init(
    gm: Any,
    graph_id: int,
    graph_order: Any,
    profiling_results: Any,
    create_inputs_fn: Any,
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> Any:
    """The same, for the first forward of this step already."""
    return gm
