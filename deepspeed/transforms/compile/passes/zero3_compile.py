"""Stage 3: gather parameters before a compiled block and release them after it."""

NAME = "zero3_compile"


def add_z3_gather_release(gm, *_, **__):  # a GraphPass
    """Gather and release around each block, which stage 3 does anyway. Returns ``gm`` unchanged (Note: settings, not
    rewriting)."""
    return gm
