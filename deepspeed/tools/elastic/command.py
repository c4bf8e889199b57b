"""`ds_elastic`: print the batch size and the valid world sizes of an `elasticity` section."""

from __future__ import annotations

import json
from collections.abc import Sequence

from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.config.elastic_batch import ELASTICITY, compute_elastic_config
from deepspeed.config.reader import load_source
from deepspeed.tools import parsers
from deepspeed.version import __version__

RULE = "-" * 42


@exit_quietly("ds_elastic")
def main(argv: Sequence[str] | None = None) -> int:
    args = parsers.elastic().parse_args(argv)
    config = load_source(args.config).data
    answer = compute_elastic_config(config, __version__, world_size=args.world_size)
    _print_under("Elasticity config:", json.dumps(config[ELASTICITY], indent=4, sort_keys=True))
    names = ("final_batch_size", "valid_gpus", "micro_batch_size")
    rows = [f"{name + ' ':.<20} {value}" for name, value in zip(names, answer, strict=False)]
    ranks = f" for world size {args.world_size}" if args.world_size > 0 else ""
    _print_under(f"Calculated results{ranks}:", "\n".join(rows))
    return 0


def _print_under(title: str, text: str) -> None:
    print(f"{RULE}\n{title}\n{RULE}\n{text}")


if __name__ == "__main__":
    raise SystemExit(main())
