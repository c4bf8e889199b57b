"""`ds_bench`: benchmark collectives by operation, size and transport.

This module parses the options and starts the job through the launcher, like any script; the ranks run
`deepspeed/tools/bench_ranks.py`, which measures. Inside a job of another launcher, it runs that module directly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed.base.tool_arguments import ArgumentParser, add_options, exit_quietly, takes
from deepspeed.tools.launcher import runner

RANKS_MODULE = "deepspeed.tools.bench_ranks"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "pt2pt")
TRANSPORTS = ("shared_memory", "gloo", "torch")
DTYPES = "float32 float float16 half bfloat16 float64 double int32 int int64 long uint8".split()


def parser() -> ArgumentParser:
    made = ArgumentParser(
        prog="ds_bench",
        description="Measure how fast the ranks of a job exchange tensors, by collective, size and transport.",
        epilog="All other options are those of `deepspeed`, such as --num_gpus, --hostfile and --include.",
        allow_abbrev=False,
    )
    options = {
        "--trials N": takes("number of timed calls (default: 5)", 5),
        "--warmups N": takes("number of calls before the timed ones (default: 5)", 5),
        "--maxsize K": takes("largest tensor, in 2**K elements (default: 24)", 24),
        "--minsize K": takes("smallest tensor, in 2**K elements (default: 10)", 10),
        "--scan": "measure every power of two (default: every fourth)",
        "--dtype": takes("default: float32", "float32", choices=DTYPES),
        "--bw-unit": takes("bits or bytes per second (default: Gbps)", "Gbps", choices=("Gbps", "GBps")),
        "--mem-factor F": takes("fraction of the free memory to use", 0.3),
        "--backend": takes("backend of the process group (default: that of the device)"),
        "--dist": takes(
            "measure only our transports, or only torch.distributed", choices=("deepspeed", "torch")
        ),
        "--transport": takes("measure only these transports", choices=TRANSPORTS, nargs="+"),
        "--async-op": "issue all trials before waiting for any",
        "--raw": "print numbers without units",
        "--debug": "also print the result of each rank",
        "--json FILE": takes("write the rows as JSON"),
        "--plot FILE": takes("plot the results (needs matplotlib)"),
        **{f"--{name.replace('_', '-')}": _only(name) for name in OPERATIONS},
    }
    return add_options(made, options)


def _only(operation: str) -> dict[str, Any]:
    about = "measure only the given collectives"
    return takes(about, action="append_const", dest="operations", const=operation)


@exit_quietly("ds_bench")
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    made = parser()
    options, of_launcher = made.parse_known_args(arguments)
    if options.trials < 1 or options.warmups < 0 or not 0 <= options.minsize <= options.maxsize <= 40:
        made.error("--trials must be at least 1, --warmups at least 0, and 0 <= --minsize <= --maxsize <= 40")
    if not 0 < options.mem_factor <= 1:
        made.error(f"--mem-factor {options.mem_factor}: must be above 0 and at most 1")
    if options.transport is None and options.dist is not None:
        options.transport = [name for name in TRANSPORTS if (name == "torch") == (options.dist == "torch")]
    options.operations = options.operations or list(OPERATIONS)
    for name in ("json", "plot"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, os.path.abspath(path))
    what = json.dumps(vars(options))
    if "RANK" in os.environ:
        return subprocess.call([sys.executable, "-m", RANKS_MODULE, what])
    runner.main([*of_launcher, "--no_local_rank", "--module", RANKS_MODULE, what])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
