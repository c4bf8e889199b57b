"""Stage 3: prefetch the parameters of the next blocks."""

NAME = "prefetch"


def schedule_prefetch(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """Prefetch up to ``stage3_prefetch_bucket_size`` from this step of a schedule on; a step without this pass does not
    prefetch. Returns ``gm`` unchanged (Note: settings, not rewriting)."""
    return gm
