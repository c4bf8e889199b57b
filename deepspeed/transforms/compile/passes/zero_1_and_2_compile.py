"""Stages 1 and 2: reduce gradients over the ranks while backward runs."""

NAME = "zero1_compile"
NAME_Z2 = "zero2_compile"


def add_z1_reduce(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """Reduce gradients, which stage 1 does anyway. Returns ``gm`` unchanged (Note: settings, not rewriting)."""
    return gm


def add_z2_reduce(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """Reduce gradients, which stage 2 does anyway. Returns ``gm`` unchanged."""
    return gm
