"""From the command to the first collective on several machines: `deepspeed` over ssh against `torchrun` by hand.

    python benchmarks/job_start.py [--hosts 4] [--runs 3]

The machines are network namespaces with a real sshd (`tests/launcher/real_machines.py`). "By hand" means that a
`torchrun` with all options is started on every machine at the same moment, without ssh: nothing could be sooner.
The second column is one ssh connection per machine that starts `torchrun`, as a shell script would do it.
"""

from __future__ import annotations

import argparse
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

from tests.launcher.real_machines import Machines, why_not

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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name, Machines(args.hosts, Path(name)) as machines:
        folder = Path(name)
        (folder / "rank.py").write_text(RANK)
        (folder / "hosts").write_text("".join(f"host{i} slots=1\n" for i in range(args.hosts)))
        ways = {"by hand": by_hand, "torchrun over ssh": over_ssh, "deepspeed over ssh": ours}
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.runs):  # in turn: the machine is not the same all the time
            for way, start in ways.items():
                taken[way].append(timed(start(machines, folder), args.hosts))
        print(
            f"{args.hosts} hosts, one rank each; seconds to the end of the first all_reduce, median of {args.runs}"
        )
        least = statistics.median(taken["by hand"])
        for way, seconds in taken.items():
            median = statistics.median(seconds)
            print(
                f"{way:<20} {median:6.2f}  {median / least:5.2f}x   ({', '.join(f'{s:.2f}' for s in seconds)})"
            )


def timed(start: Callable[[], list[subprocess.Popen[str]]], hosts: int) -> float:
    began = time.time()
    running = start()
    said = running[0].communicate(timeout=120)[0]
    for process in running[1:]:
        process.communicate(timeout=120)
    words = next(line for line in said.splitlines() if "sum" in line).split()
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


def by_hand(machines: Machines, folder: Path) -> Callable[[], list[subprocess.Popen[str]]]:
    return lambda: [_popen(machines, host, torchrun(machines, host)) for host in range(machines.count)]


def over_ssh(machines: Machines, folder: Path) -> Callable[[], list[subprocess.Popen[str]]]:
    def command(host: int) -> list[str]:
        words = f"cd {shlex.quote(str(folder))}; OMP_NUM_THREADS=1 {shlex.join(torchrun(machines, host))}"
        return ["ssh", f"host{host}", words]

    return lambda: [_popen(machines, 0, command(host)) for host in range(machines.count)]


def ours(machines: Machines, folder: Path) -> Callable[[], list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hosts", "--launcher", "ssh"]
    command += ["--force_multi", "--no_local_rank", "rank.py"]
    return lambda: [_popen(machines, 0, command)]


if __name__ == "__main__":
    main()
