"""Offload of optimizer states to host memory, except during updates."""

NAME = "offload_adam_states"
NAME_SYNC = "offload_adam_states_sync"
NAME_INIT = "offload_adam_states_for_init"


def move_opt_states(gm, *_, **__):  # a GraphPass
    """Offload master weights and optimizer states after each update, and fetch them before the next one, from this step
    of a schedule on, with asynchronous copies. Returns ``gm`` unchanged (Note: settings, not rewriting)."""
    return gm


def move_opt_states_sync(gm, *_, **__):  # a GraphPass
    """Do as ``move_opt_states``, with synchronous copies."""
    return gm


def offload_adam_states_for_init(gm, *_, **__):  # a GraphPass
    """Do as ``move_opt_states``, starting before the first forward of this step."""
    return gm
