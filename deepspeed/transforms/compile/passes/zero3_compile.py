"""Stage 3: parameters are gathered before a compiled block and released after it."""

NAME = "zero3_compile"


def add_z3_gather_release(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """In a schedule: gather and release around each block, which is what stage 3 does in any case. ``gm`` is returned
    as it is (Note: settings, not rewriting)."""
    return gm
