"""Stage 3: what the next blocks need is gathered ahead of its use."""

NAME = "prefetch"


def schedule_prefetch(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):  # a GraphPass
    """In a schedule: from this step on, gather ahead as far as ``stage3_prefetch_bucket_size`` allows; a step without
    this pass gathers nothing ahead. ``gm`` is returned as it is (Note: settings, not rewriting)."""
    return gm
