"""Stage 3: gather parameters before a compiled block and release them after it."""

NAME = "zero3_compile"


def add_z3_gather_release(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """Gather and release around each block, which stage 3 does anyway. Returns ``gm`` unchanged (Note: settings, not
    rewriting)."""
    return gm
