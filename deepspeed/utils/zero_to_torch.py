#!/usr/bin/env python
"""Turn a checkpoint into plain weights of 32 or 16 bits that load without this package.

    ./zero_to_torch.py . out/ --dtype bf16        # in a folder of checkpoints: the one that "latest" names

A copy of this file is stored next to every checkpoint, beside ``zero_to_fp32.py``, which does the work; it needs the
installed package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

if __package__:
    from deepspeed.utils import zero_to_fp32
else:  # the copy beside a checkpoint
    import zero_to_fp32  # type: ignore[no-redef]  # pyright: ignore[reportMissingImports]


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the weights of a checkpoint as plain files.")
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, with a file named 'latest'")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--dtype", required=True, choices=sorted(zero_to_fp32.OUTPUT_DTYPE_NAMES))
    parser.add_argument("--max_shard_size", default="5GB", help="largest file, such as 5GB or 200MB")
    parser.add_argument(
        "--safe_serialization", action="store_true", help="safetensors instead of torch files"
    )
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint, such as global_step100")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only trained parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="show tracebacks")
    given = parser.parse_args(args)
    try:
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            dtype=given.dtype,
            max_shard_size=given.max_shard_size,
            safe_serialization=given.safe_serialization,
            tag=given.tag,
            exclude_frozen_parameters=given.exclude_frozen_parameters,
        )
    except ValueError as error:
        if given.debug:
            raise
        parser.exit(1, f"zero_to_torch: {error}\n")


if __name__ == "__main__":
    main()
