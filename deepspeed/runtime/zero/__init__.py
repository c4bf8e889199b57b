"""ZeRO: sharded optimizer state, gradients and parameters. The documented names are found by ``_compat``."""
