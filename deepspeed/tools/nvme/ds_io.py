"""`ds_io`: time reads or writes of files with one configuration, and print it as the `aio` section of a config."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.tools import parsers
from deepspeed.tools.nvme import measure

SAME_NAMES = (
    "io_size", "read", "engine", "block_size", "queue_depth", "single_submit", "fast_io_size", "validate",
)  # fmt: skip
"""Options whose values are the fields of a transfer with these names."""


def plans(args: argparse.Namespace) -> list[measure.MeasurePlan]:
    """Return one plan per process: one for each device of each mapped folder, or `multi_process` for one folder.
    FileNotFoundError, ValueError."""
    if args.folder is not None:
        places = [(args.folder, index) for index in range(args.multi_process)]
    else:
        places = [place for text in args.folder_to_device_mapping for place in _devices(text)]
    made = []
    for folder, device in places:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{folder}: no such directory")
        transfer = measure.Transfer(
            **{name: getattr(args, name) for name in SAME_NAMES},
            overlap_events=not args.sequential_requests,
            intra_op_parallelism=args.io_parallel,
            device=device if args.gpu else None,
            gds=args.use_gds,
            pinned=not args.slow_bounce_buffer,
            legacy_save=args.torch_legacy_save,
        )
        name = f"_ds_io_{args.engine}_{args.io_size}_{device}"
        made.append(
            measure.MeasurePlan(
                transfer, folder, name, args.loops, args.warmup_loops, args.different_file_each_iteration
            )
        )
    return made


def _devices(text: str) -> list[tuple[str, int]]:
    folder, _, devices = text.rpartition(":")
    if not folder or not all(part.isdigit() for part in devices.split(",")):
        raise ValueError(f"--folder_to_device_mapping {text!r}: expected FOLDER:0,1,...")
    return [(folder, int(part)) for part in devices.split(",")]


@exit_quietly("ds_io", OSError, ValueError, NotImplementedError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = parsers.io().parse_args(arguments)
    measure.check_devices(args.gpu)
    to_do = plans(args)
    values = measure.speeds(to_do, args.include_warmup_time, progress=True)
    print(
        f"{args.engine} {'read' if args.read else 'write'} of {args.io_size} bytes: {measure.summary(values)}"
    )
    if args.engine in measure.HANDLES:
        print(json.dumps(measure.aio_section(dataclasses.asdict(to_do[0].transfer)), indent=3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
