"""The optimizer's states are in host memory except while it updates."""

NAME = "offload_adam_states"
NAME_SYNC = "offload_adam_states_sync"
NAME_INIT = "offload_adam_states_for_init"


def move_opt_states(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """In a schedule: from this step on, master weights and optimizer states leave the device after each update and come
    back before the next one; the copies do not wait. ``gm`` is returned as it is (Note: settings, not rewriting)."""
    return gm


def move_opt_states_sync(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """The same, with copies that are waited for."""
    return gm


def offload_adam_states_for_init(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """The same, for the first forward of this step already."""
    return gm
