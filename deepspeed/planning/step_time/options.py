"""Step-time options of `ds plan`. The modules behind them are imported only if one is given."""

from __future__ import annotations

import argparse

from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.tool_arguments import takes


class TimeError(ExplainedError, ValueError):
    """The step-time options are incomplete or contradict each other."""


STEP_TIME = {
    "--calibrate FILE": takes(
        "train a few steps on 1 and 2 ranks of this machine and write the timings to FILE"
    ),
    "--batch MODULE:FUNCTION": takes("with --calibrate: function that returns the model's inputs"),
    "--calibration FILE": takes("predict the step time on machines like the one that wrote FILE"),
    "--on DEVICE": takes("predict the step time on a device: A100, H100, or a JSON file with its rates"),
    "--network NAME": takes(
        "network between nodes: 1GbE, 10GbE, 25GbE, 100GbE, HDR, NDR, a rate such as 100Mbit, or a JSON file"
    ),
    "--choices": "also rank layouts for the same batch on these ranks: ZeRO, TP, PP, SP, EP, offload",
}
"""Step-time options of `ds plan`."""


def is_asked(args: argparse.Namespace) -> bool:
    return args.calibration is not None or args.on is not None


def check(args: argparse.Namespace) -> None:
    """Check the combination of options. TimeError: one needs or excludes another."""
    if args.calibration is not None and args.on is not None:
        raise TimeError("--calibration and --on both describe the hardware; pass only one")
    for name in ("network", "choices"):
        if getattr(args, name) and not is_asked(args):
            raise TimeError(f"--{name} needs --calibration FILE or --on DEVICE, for the compute time")
    if is_asked(args) and args.nodes > 1 and args.network is None:
        raise TimeError(f"--nodes {args.nodes}: set the network between them, such as --network 100GbE")
    if args.batch is not None and args.calibrate is None:
        raise TimeError("--batch needs --calibrate")


def device_memory(args: argparse.Namespace) -> int | None:
    """Return the memory in bytes of the device named by --on, or None without --on. HardwareError: the device is
    unknown."""
    from deepspeed.planning.step_time.hardware import device

    return None if args.on is None else device(args.on).memory
