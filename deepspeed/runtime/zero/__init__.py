"""ZeRO: sharded optimizer state, gradients and parameters. The documented names are resolved by ``_compat``."""
