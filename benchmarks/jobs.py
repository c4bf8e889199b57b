"""Driver side: jobs of persistent ranks, taken in turn.

Every contender of a comparison is a `Job` whose ranks sleep on a pipe until told to work, so an idle one
costs memory and nothing else. The driver goes round them; a slow moment of a shared machine then hits
neighbours in the same round, and the ratio within a round is what counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
OURS = sys.executable
GRACE_S = 5.0  # for a rank to end by itself before it is killed
SHARED_MEMORY = Path("/dev/shm")


Place = Callable[[int], tuple[list[str], dict[str, str]]]
"""For a rank, what to write before its command, and what to change in its environment (links.py)."""


class JobError(RuntimeError):
    """A rank failed; holds its traceback and the end of what it printed."""


class Job:
    """Ranks of one contender, each an instance of ``target`` ("module:Class" of this folder) in its process.

    Args:
        target: what each rank makes, with ``options`` as keyword arguments.
        python: the interpreter: this one measures this checkout, any other what is installed there.
        ranks, threads: number of processes, and of threads in each.
        timeout: seconds to wait for any answer (a first call may compile kernels).
        place: for a rank, what to write before its command, and what to change in its environment (links.py).
    """

    def __init__(
        self,
        name: str,
        target: str,
        options: Mapping[str, Any],
        *,
        python: str = OURS,
        ranks: int = 2,
        threads: int = 1,
        timeout: float = 600.0,
        place: Place | None = None,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self.port = free_port()
        command = [python, str(FOLDER / "worker.py"), target, json.dumps(dict(options))]
        places = [place(rank) if place else ([], {}) for rank in range(ranks)]
        self.processes = [
            subprocess.Popen(
                [*before, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
                bufsize=1,
                cwd=FOLDER,
                env={**rank_environment(python, rank, ranks, threads, self.port), **own},
            )
            for rank, (before, own) in enumerate(places)
        ]
        try:
            self._collect("start")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """Call ``method`` on every rank at once; the answers in rank order."""
        line = json.dumps([method, arguments]) + "\n"
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self._collect(method)

    def _collect(self, what: str) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        values = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            if not line:
                reason = "ended" if ready else f"did not answer within {self.timeout:.0f} s"
                raise JobError(f"{self.name}: rank {rank} {reason} in {what}\n{self._log_tail()}")
            answer = json.loads(line)
            if "error" in answer:
                raise JobError(
                    f"{self.name}: rank {rank} failed in {what}\n{answer['error']}{self._log_tail()}"
                )
            values.append(answer["value"])
        return values

    def _log_tail(self) -> str:
        self.log.seek(0)
        return self.log.read()[-3000:]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for left in SHARED_MEMORY.glob(f"deepspeed_*_{self.port}_*"):  # the peer's ranks leave 69 MB each
            left.unlink(missing_ok=True)
        self.log.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def rank_environment(python: str, rank: int, ranks: int, threads: int, port: int) -> dict[str, str]:
    """What a launcher would set. This interpreter sees this checkout, and keeps its bytecode as an installation does;
    another one what is installed there, and keeps the kernels that it compiles in its own environment (a lock file that
    somebody else's interrupted build left in the user's cache would make it wait for ever)."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    if python == OURS:
        environment["PYTHONPATH"] = str(FOLDER.parent)
    else:
        environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(python).parent.parent / "torch_extensions"))
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PATH": os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)]),
    }
    environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Contender:
    """A row of a comparison: how to make its job, and what it is compared with."""

    name: str
    target: str
    options: Mapping[str, Any]
    python: str = OURS
    ranks: int = 2
    threads: int = 1
    goal: float | None = None
    memory_gib: float = 0.0  # of all ranks together, estimated
    place: Place | None = None

    def start(self) -> Job:
        return Job(
            self.name,
            self.target,
            self.options,
            python=self.python,
            ranks=self.ranks,
            threads=self.threads,
            place=self.place,
        )


@contextlib.contextmanager
def started(contenders: Sequence[Contender]) -> Iterator[dict[str, Job]]:
    """All jobs, started one after another (compilers and imports would disturb each other)."""
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for contender in contenders:
            progress(f"starting {contender.name}")
            jobs[contender.name] = stack.enter_context(contender.start())
        yield jobs


def round_robin(
    jobs: Mapping[str, Job], rounds: int, measure: Callable[[Job], float]
) -> dict[str, list[float]]:
    """``measure(job)`` for each job in each round; each round starts with another job."""
    names = list(jobs)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        first = number % len(names)
        for name in names[first:] + names[:first]:
            values[name].append(measure(jobs[name]))
    return values


def pack(
    contenders: Sequence[Contender], always: Sequence[Contender], limit_gib: float
) -> list[list[Contender]]:
    """Split into runs that fit into memory; each contains ``always`` (the baselines)."""
    fixed = sum(c.memory_gib for c in always)
    runs: list[list[Contender]] = []
    used = limit_gib
    for contender in contenders:
        if not runs or used + contender.memory_gib > limit_gib:
            runs.append(list(always))
            used = fixed
        runs[-1].append(contender)
        used += contender.memory_gib
    return runs or [list(always)]


@dataclass(frozen=True)
class Spread:
    """Median and range of samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(statistics.median(samples), min(samples), max(samples))

    def show(self, form: str = "{:.2f}") -> str:
        return f"{form} [{form} .. {form}]".format(self.median, self.low, self.high)


def ratios(samples: Sequence[float], baseline: Sequence[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(samples, baseline, strict=True)])


def differences(samples: Sequence[float], baseline: Sequence[float]) -> Spread:
    return Spread.of([a - b for a, b in zip(samples, baseline, strict=True)])


def progress(text: str) -> None:
    """One line on a terminal, overwritten; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def described(job: Job) -> dict[str, Any]:
    """What the first rank says of itself."""
    return job.call("describe")[0]


def measure(
    rows: Sequence[Contender], rounds: int, steps: int, tell: Callable[[Job], dict[str, Any]] = described
) -> dict[str, dict[str, Any]]:
    """Seconds and CPU seconds per step of each round, and what ``tell`` finds at the end, by contender."""
    cpu: dict[str, list[float]] = {row.name: [] for row in rows}

    def seconds_per_step(job: Job) -> float:
        seconds = max(job.call("run", steps=steps))
        cpu[job.name].append(max(job.call("cpu")))
        return seconds

    with started(rows) as jobs:
        seconds = round_robin(jobs, rounds, seconds_per_step)
        return {
            name: {"seconds": seconds[name], "cpu_seconds": cpu[name], **tell(job)}
            for name, job in jobs.items()
        }
