"""`ds_bench`: how fast the ranks of a job exchange tensors, by collective, size and transport.

This side knows the options and starts the job, like any script, through the launcher; the ranks run
`deepspeed/tools/bench_ranks.py`, which measures. Inside a job that another launcher has started, it measures at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from deepspeed.base.tool_arguments import ArgumentParser, ends_quietly
from deepspeed.tools.launcher import runner
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.shim import USAGE_ERROR

RANKS_MODULE = "deepspeed.tools.bench_ranks"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "pt2pt")
TRANSPORTS = ("shared_memory", "gloo", "torch")
DTYPES = (
    "float32",
    "float",
    "float16",
    "half",
    "bfloat16",
    "float64",
    "double",
    "int32",
    "int",
    "int64",
    "long",
    "uint8",
)


def parser() -> ArgumentParser:
    made = ArgumentParser(
        prog="ds_bench",
        description="Measure how fast the ranks of a job exchange tensors, by collective, size and transport.",
        epilog="All other options are those of `deepspeed`, such as --num_gpus, --hostfile and --include.",
        allow_abbrev=False,
    )
    made.add_argument("--trials", type=int, default=5, metavar="N", help="number of timed calls (default: 5)")
    made.add_argument(
        "--warmups",
        type=int,
        default=5,
        metavar="N",
        help="number of calls before the timed ones (default: 5)",
    )
    made.add_argument(
        "--maxsize", type=int, default=24, metavar="K", help="largest tensor, in 2**K elements (default: 24)"
    )
    made.add_argument(
        "--minsize", type=int, default=10, metavar="K", help="smallest tensor, in 2**K elements (default: 10)"
    )
    made.add_argument(
        "--scan", action="store_true", help="measure every power of two (default: every fourth)"
    )
    made.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    made.add_argument(
        "--bw-unit", choices=("Gbps", "GBps"), default="Gbps", help="bits or bytes per second (default: Gbps)"
    )
    made.add_argument(
        "--mem-factor", type=float, default=0.3, metavar="F", help="fraction of the free memory to use"
    )
    made.add_argument("--backend", help="backend of the process group (default: that of the device)")
    made.add_argument(
        "--dist",
        choices=("deepspeed", "torch"),
        help="measure only our transports, or only torch.distributed",
    )
    made.add_argument("--transport", choices=TRANSPORTS, nargs="+", help="measure only these transports")
    made.add_argument("--async-op", action="store_true", help="issue all trials before waiting for them")
    made.add_argument("--raw", action="store_true", help="print numbers without units")
    made.add_argument("--debug", action="store_true", help="also print the result of each rank")
    made.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    made.add_argument("--plot", metavar="FILE", help="plot the results (needs matplotlib)")
    for operation in OPERATIONS:
        flag = f"--{operation.replace('_', '-')}"
        made.add_argument(
            flag,
            action="append_const",
            dest="operations",
            const=operation,
            help="measure only the collectives given",
        )
    return made


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    made = parser()
    options, of_launcher = made.parse_known_args(arguments)
    if options.trials < 1 or options.warmups < 0 or not 0 <= options.minsize <= options.maxsize <= 40:
        made.error("--trials is at least 1, --warmups 0, and 0 <= --minsize <= --maxsize <= 40")
    if not 0 < options.mem_factor <= 1:
        made.error(f"--mem-factor {options.mem_factor}: above 0, at most 1")
    if options.transport is None and options.dist is not None:
        options.transport = [name for name in TRANSPORTS if (name == "torch") == (options.dist == "torch")]
    options.operations = options.operations or list(OPERATIONS)
    for name in ("json", "plot"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, os.path.abspath(path))
    what = json.dumps(vars(options))
    if "RANK" in os.environ:
        return subprocess.call([sys.executable, "-m", RANKS_MODULE, what])
    try:
        runner.main([*of_launcher, "--no_local_rank", "--module", RANKS_MODULE, what])
    except LaunchError as error:
        print(f"ds_bench: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
