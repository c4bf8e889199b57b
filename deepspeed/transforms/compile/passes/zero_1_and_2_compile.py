"""Stages 1 and 2: gradients are summed over the ranks while backward runs."""

NAME = "zero1_compile"
NAME_Z2 = "zero2_compile"


def add_z1_reduce(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """In a schedule: sum gradients as stage 1 does in any case. ``gm`` is returned as it is (Note: settings, not
    rewriting)."""
    return gm


def add_z2_reduce(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """The same for stage 2."""
    return gm
