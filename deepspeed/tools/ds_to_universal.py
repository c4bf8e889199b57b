"""Convert a checkpoint to a universal one, in the layout of release 0.19:

    python -m deepspeed.tools.ds_to_universal --input_folder ckpt/global_step3 --output_folder ckpt/universal

Then ``"checkpoint": {"load_universal": true}`` and ``load_checkpoint("ckpt")`` load it, here and in that release.
Checkpoints of this package do not need the conversion: they load on any number of ranks as they are.
"""

from __future__ import annotations

import argparse
import sys

from deepspeed.base.tool_arguments import add_options, takes
from deepspeed.checkpoint.foreign.universal_export import convert


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Convert a checkpoint to a universal checkpoint.")
    options = {
        "--input_folder": takes("folder of one checkpoint, such as global_step3", required=True),
        "--output_folder": takes("folder for the universal checkpoint", required=True),
        "--num_extract_workers": takes("accepted, no effect: there are no temporary files", 4),
        "--num_merge_workers": takes("number of processes; each holds one tensor in memory", 2),
        "--keep_temp_folder": "accepted, no effect: there are no temporary files",
        "--no_strict": takes("do not verify the result by opening it", dest="strict", action="store_false"),
        "--inject_missing_state": "also write weights without optimizer state, and zeros for missing state",
        "--zero_stage": takes(
            "ZeRO stage at which release 0.19 will load it (default: the checkpoint's stage)",
            type=int,
            choices=(1, 2, 3),
        ),
    }
    return add_options(parser, options).parse_args()


def main(args: argparse.Namespace) -> None:
    """Convert according to ``args`` (``parse_arguments``; only the two folders are required). CheckpointError: see
    ``universal_export.convert``."""
    folder = convert(
        args.input_folder,
        args.output_folder,
        processes=max(1, getattr(args, "num_merge_workers", 1)),
        verify=getattr(args, "strict", True),
        inject_missing_state=getattr(args, "inject_missing_state", False),
        zero_stage=getattr(args, "zero_stage", None),
    )
    print(f"wrote the universal checkpoint {folder}")


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except ValueError as error:
        sys.exit(f"ds_to_universal: {error}")
    except KeyboardInterrupt:
        sys.exit("ds_to_universal: interrupted; nothing was written")
