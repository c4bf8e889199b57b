"""One run of the benchmarks that fill the README and docs/performance.md, each with the rivals that are installed.

    make bench                                   about an hour on two cores; ends in one table
    make bench BENCH=--quick                     a few minutes: every script runs, and its numbers mean nothing
    python benchmarks/everything.py --only start adam --save mine

Environments are looked for beside the checkout, where README.md says to make them; what is missing is left out, and
said. With `--save cpu2`, `python benchmarks/performance.py` then writes the numbers into the pages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import FOLDER
from performance import Results, other_numbers, step_times
from report import RESULTS, Report

BESIDE = FOLDER.parent.parent
LIMIT_S = 3600


@dataclass(frozen=True)
class Run:
    """A script with its arguments. ``what`` is added to the name under which its result is saved."""

    script: str
    arguments: tuple[str, ...] = ()
    what: str = ""
    peer: str | None = "peer"
    """The environment of its rival; None: the script takes none."""
    clients: bool = False
    """Whether it needs Transformers on our side."""

    @property
    def name(self) -> str:
        return self.script + (f"_{self.what}" if self.what else "")


RUNS = (
    Run("train_step"),
    Run("train_step", ("--sizes", "10M", "--offload", "2+cpu", "3+cpu", "3+nvme"), "offload_10M"),
    Run("engine_cost"),
    Run("start"),
    Run("checkpoint"),
    Run("adam"),
    Run("comm_shared_memory"),
    Run("compiled_stage3", peer=None),
    Run("pipeline", peer=None),
    Run("growth", peer=None),
    Run("trainer_step", peer="clients_peer", clients=True),
    Run("tensor_parallel", peer="clients_peer", clients=True),
    Run("inference", ("--only", "decode"), "decode", peer="llama", clients=True),
    Run("rollouts", peer=None, clients=True),
    Run("trl_step", peer=None, clients=True),
)
FLAGS = {"llama": "--llama"}
"""How a script is told of an environment; others: `--peer`."""


def interpreter(name: str) -> Path | None:
    found = BESIDE / name / "bin" / "python"
    return found if found.exists() else None


def command_of(run: Run, save: str | None, quick: bool) -> tuple[list[str] | None, str]:
    """The command, and what it is run without; no command: our side cannot run it."""
    ours = interpreter("clients") if run.clients else Path(sys.executable)
    if ours is None:
        return None, "not run: no ../clients"
    command = [str(ours), str(FOLDER / f"{run.script}.py"), *run.arguments]
    without = ""
    if run.peer is not None:
        rival = interpreter(run.peer)
        if rival is None:
            without = f"without ../{run.peer}"
        else:
            command += [FLAGS.get(run.peer, "--peer"), str(rival)]
    if quick:
        command.append("--quick")
    elif save is not None:
        command += ["--save", "_".join(filter(None, (run.what, save)))]
    return command, without


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="All benchmarks of the pages, and one table.")
    parser.add_argument("--quick", action="store_true", help="the short form of each script")
    parser.add_argument(
        "--save", metavar="WHAT", help="save each result under this name; default: only print"
    )
    parser.add_argument(
        "--only", nargs="+", choices=sorted({run.script for run in RUNS}), help="default: all"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    failed = 0
    rows = []
    for run in RUNS:
        if arguments.only and run.script not in arguments.only:
            continue
        command, note = command_of(run, arguments.save, arguments.quick)
        begin, ended = time.perf_counter(), note
        if command is not None:
            print(f"\n=== {run.name}", flush=True)
            try:
                code = subprocess.run(command, cwd=FOLDER.parent, timeout=LIMIT_S).returncode
            except subprocess.TimeoutExpired:
                code = 124
            failed += code != 0
            ended = ", ".join(filter(None, ("ran" if code == 0 else f"FAILED with {code}", note)))
        rows.append([run.name, f"{time.perf_counter() - begin:.0f}", ended])
    arguments.save, what = None, arguments.save
    report = Report("everything", arguments)
    report.table("scripts", ["", "seconds", ""], rows)
    if what is not None and not arguments.quick:
        results = Results(RESULTS, what)
        print("\n".join(["", *step_times(results), *other_numbers(results), results.sources()]))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
