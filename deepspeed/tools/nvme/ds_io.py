"""`ds_io`: time reads or writes of files with one configuration, and print it as the `aio` section of a config."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from deepspeed.base.tool_arguments import ArgumentParser, ends_quietly
from deepspeed.tools.nvme.engines import ENGINES, HANDLES, Transfer
from deepspeed.tools.nvme.measure import Plan, aio_section, byte_count, check_devices, speeds, summary


def parser() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_io",
        description="Time reads or writes of files with one configuration, and print it as an `aio` section.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", help="directory for the files")
    where.add_argument(
        "--folder_to_device_mapping",
        nargs="+",
        metavar="FOLDER:DEVICES",
        help="directories and the accelerators that use each, such as /nvme0:0,1 /nvme1:2,3",
    )
    made.add_argument("--io_size", type=_bytes, required=True, help="bytes per file (K, M, G)")
    made.add_argument("--fast_io_size", type=_bytes, default="64M", help="bytes that torch_fastio buffers")
    made.add_argument("--read", action="store_true", help="time reads instead of writes")
    made.add_argument(
        "--multi_process", type=_count, default=1, help="processes per folder, with one file each"
    )
    made.add_argument("--block_size", type=_bytes, default="1M", help="bytes per request")
    made.add_argument("--queue_depth", type=_count, default=32, help="requests in flight")
    made.add_argument("--single_submit", action="store_true", help="one system call per request")
    made.add_argument(
        "--sequential_requests", action="store_true", help="do not overlap submission and waiting"
    )
    made.add_argument(
        "--validate", action="store_true", help="verify the transferred bytes, within the measured time"
    )
    made.add_argument("--engine", choices=ENGINES, default="aio_handle")
    made.add_argument("--loops", type=_count, default=3)
    made.add_argument("--io_parallel", type=_count, default=1, help="threads that share one transfer")
    made.add_argument("--gpu", action="store_true", help="use tensors on the accelerator")
    made.add_argument("--use_gds", action="store_true", help="use GPUDirect Storage")
    made.add_argument(
        "--slow_bounce_buffer", action="store_true", help="use pageable instead of page-locked host memory"
    )
    made.add_argument(
        "--torch_legacy_save", action="store_true", help="use torch's legacy format instead of zip files"
    )
    made.add_argument(
        "--use_accelerator_pin_memory",
        action="store_true",
        help="use memory pinned for the accelerator (locked memory already is, if there is an accelerator)",
    )
    made.add_argument("--warmup_loops", type=int, default=1)
    made.add_argument("--include_warmup_time", action="store_true")
    made.add_argument("--different_file_each_iteration", action="store_true")
    return made


def _bytes(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def plans(args: argparse.Namespace) -> list[Plan]:
    """One per process: every device of every folder, or `multi_process` ones."""
    if args.folder is not None:
        places = [(args.folder, index) for index in range(args.multi_process)]
    else:
        places = [place for text in args.folder_to_device_mapping for place in _devices(text)]
    made = []
    for folder, device in places:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{folder}: no such directory")
        transfer = Transfer(
            io_size=args.io_size,
            read=args.read,
            engine=args.engine,
            block_size=args.block_size,
            queue_depth=args.queue_depth,
            single_submit=args.single_submit,
            overlap_events=not args.sequential_requests,
            intra_op_parallelism=args.io_parallel,
            fast_io_size=args.fast_io_size,
            device=device if args.gpu else None,
            gds=args.use_gds,
            pinned=not args.slow_bounce_buffer,
            legacy_save=args.torch_legacy_save,
            validate=args.validate,
        )
        name = f"_ds_io_{args.engine}_{args.io_size}_{device}"
        made.append(
            Plan(transfer, folder, name, args.loops, args.warmup_loops, args.different_file_each_iteration)
        )
    return made


def _devices(text: str) -> list[tuple[str, int]]:
    folder, _, devices = text.rpartition(":")
    if not folder or not all(part.isdigit() for part in devices.split(",")):
        raise ValueError(f"--folder_to_device_mapping {text!r}: expected FOLDER:0,1,...")
    return [(folder, int(part)) for part in devices.split(",")]


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        check_devices(args.gpu)
        to_do = plans(args)
        values = speeds(to_do, args.include_warmup_time, progress=True)
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"ds_io: {error}", file=sys.stderr)
        return 1
    print(f"{args.engine} {'read' if args.read else 'write'} of {args.io_size} bytes: {summary(values)}")
    if args.engine in HANDLES:
        print(json.dumps(aio_section(dataclasses.asdict(to_do[0].transfer)), indent=3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
