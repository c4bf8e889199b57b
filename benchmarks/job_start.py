"""From the command to the first collective on several machines: `deepspeed` over ssh against `torchrun` by hand.

    python benchmarks/job_start.py [--hosts 4] [--runs 3] [--peer ../peer/bin/python] [--save ssh]

The machines are network namespaces with a real sshd (`tests/tools/launcher/real_machines.py`). "By hand" means that a
`torchrun` with all options is started on every machine at the same moment, without ssh: nothing could be sooner.
"Over ssh" is one connection per machine that starts `torchrun`, as a shell script would do it. The peer uses pdsh.
"""

from __future__ import annotations

import functools
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jobs import progress, ratios
from report import Report, common_arguments
from tests.tools.launcher.real_machines import Machines, why_not

Started = list[subprocess.Popen[str]]
Way = Callable[[Machines, Path], Started]
GOALS = {"deepspeed over ssh": "<= 1.50"}  # of torchrun by hand

RANK = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
if dist.get_rank() == 0:
    print("sum", int(ones), time.time(), flush=True)
dist.barrier()
"""


def main() -> None:
    parser = common_arguments("Seconds from the command to the first collective, over ssh.")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    report = Report("job_start", args)
    ways: dict[str, Way] = {"by hand": by_hand, "torchrun over ssh": over_ssh, "deepspeed over ssh": ours}
    if args.peer:
        ways["peer over pdsh"] = functools.partial(launched, str(Path(args.peer).absolute()), "pdsh")
    with tempfile.TemporaryDirectory() as name, Machines(args.hosts, Path(name)) as machines:
        folder = Path(name)
        (folder / "rank.py").write_text(RANK)
        (folder / "hosts").write_text("".join(f"host{i} slots=1\n" for i in range(args.hosts)))
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(1 if args.quick else args.runs):  # in turn: the machine is not the same all the time
            for way, start in ways.items():
                progress(way)
                taken[way].append(timed(way, functools.partial(start, machines, folder), args.hosts))
    rows = []
    for way, seconds in taken.items():
        times = ratios(seconds, taken["by hand"]).show()
        rows.append([way, f"{statistics.median(seconds):.2f}", times, GOALS.get(way, "")])
    report.table(
        f"{args.hosts} hosts, one rank each: to the end of the first all_reduce",
        ["", "seconds", "times by hand, median [min .. max]", "goal"],
        rows,
    )
    report.data["seconds"] = taken
    report.save()


def timed(way: str, start: Callable[[], Started], hosts: int) -> float:
    began = time.time()
    running = start()
    try:
        said = [process.communicate(timeout=60)[0] for process in running][0]
    except subprocess.TimeoutExpired:
        for process in running:
            process.kill()
        raise SystemExit(f"{way}: no end after 60 s; run again, and look at stderr of its ranks") from None
    words = next((line for line in said.splitlines() if "sum" in line), "").split()
    if not words:
        raise SystemExit(f"{way}: no result; it printed: {said[-2000:]}")
    words = words[words.index("sum") :]
    assert int(words[1]) == hosts
    return float(words[2]) - began


def torchrun(machines: Machines, host: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", f"--nnodes={machines.count}"),
        *(f"--node_rank={host}", f"--master_addr={machines.address(0)}", "--master_port=29400", "rank.py"),
    ]


def _popen(machines: Machines, host: int, command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*machines.entry(host), *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def by_hand(machines: Machines, folder: Path) -> Started:
    return [_popen(machines, host, torchrun(machines, host)) for host in range(machines.count)]


def over_ssh(machines: Machines, folder: Path) -> Started:
    def command(host: int) -> list[str]:
        words = f"cd {shlex.quote(str(folder))}; OMP_NUM_THREADS=1 {shlex.join(torchrun(machines, host))}"
        return ["ssh", f"host{host}", words]

    return [_popen(machines, 0, command(host)) for host in range(machines.count)]


def ours(machines: Machines, folder: Path) -> Started:
    return launched(sys.executable, "ssh", machines, folder)


def launched(python: str, launcher: str, machines: Machines, folder: Path) -> Started:
    command = [python, "-m", "deepspeed.launcher.runner", "--hostfile", "hosts", "--launcher", launcher]
    command += ["--force_multi", "--no_local_rank", "rank.py"]
    return [_popen(machines, 0, command)]


if __name__ == "__main__":
    main()
