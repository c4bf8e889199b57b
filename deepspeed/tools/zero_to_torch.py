#!/usr/bin/env python
"""Convert a checkpoint to plain 32-bit or 16-bit weights that load without this package.

    ./zero_to_torch.py . out/ --dtype bf16        # in a folder of checkpoints: the one that "latest" names

A copy of this file is stored next to every checkpoint, with ``zero_to_fp32.py``, which does the work; it needs the
installed package.
"""

from __future__ import annotations

from collections.abc import Sequence

if __package__:
    from deepspeed.tools import zero_to_fp32
else:  # the copy next to a checkpoint
    import zero_to_fp32  # type: ignore[no-redef]  # pyright: ignore[reportMissingImports]


def main(args: Sequence[str] | None = None) -> None:
    parser = zero_to_fp32.command_parser("Write the weights of a checkpoint as plain files.")
    parser.add_argument("--dtype", required=True, choices=sorted(zero_to_fp32.OUTPUT_DTYPE_NAMES))
    zero_to_fp32.run_command(
        parser, args, zero_to_fp32.convert_zero_checkpoint_to_state_dict, "zero_to_torch"
    )


if __name__ == "__main__":
    main()
