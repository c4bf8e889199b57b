"""Supervision of one machine's ranks: torch's elastic agent, with the launcher's rules for ending a job.

The agent starts the ranks, each in its own session, monitors them, and stops the others when one fails.
Added here: a time limit on stopping, and clean-up of every descendant; `failures.py` finds the rank that failed first,
and why.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from deepspeed.tools.launcher import processes
from deepspeed.tools.launcher.errors import LaunchError, logger
from deepspeed.tools.launcher.failures import Failure, causes_first, show, write_report
from deepspeed.tools.launcher.shim import ERROR_FILE, SCRIPT_ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJob:
    """The part of a job that one machine runs."""

    command: tuple[str, ...]  # program and arguments of every rank; ranks differ only in their environment
    ranks: int  # on this machine
    node_rank: int
    nodes: int
    master_addr: str
    master_port: int
    log_dir: Path | None  # folder for one log file per rank; None: ranks write to this process's output
    prefix_output: bool = False
    adds_local_rank: bool = False  # the shim gives each rank a --local_rank=N
    script: str  # for messages
    report: Path | None = None  # file for the failures, read by the command that started several machines
    min_nodes: int = 0  # fewest machines with which an elastic job continues
    max_nodes: int = 0


class SingleMachineRendezvous(RendezvousHandler):
    """A rendezvous without peers: it needs no server, and leaves the port free for rank 0 to listen on."""

    def __init__(self, master_addr: str, master_port: int) -> None:
        self._store_info = RendezvousStoreInfo(master_addr, master_port)
        self._run_id = uuid.uuid4().hex

    def get_backend(self) -> str:
        return "one-machine"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, self._store_info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other agent can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class RankFiles(LogsSpecs):
    """The files that a rank writes: its error report always, its output only if a log folder is given."""

    def __init__(self, run_dir: Path, log_dir: Path | None, output: PrefixedOutput | None = None) -> None:
        super().__init__()
        self._output = output
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._started = time.strftime("%Y%m%d%H%M%S")
        self._starts = 0

    @property
    def root_log_dir(self) -> str:
        return str(self._run_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        error_files, stdouts, stderrs = {}, dict.fromkeys(envs, ""), dict.fromkeys(envs, "")
        again = f"_start{self._starts}" if self._starts else ""
        self._starts += 1
        for local_rank, env in envs.items():
            folder = self._run_dir / str(local_rank)
            folder.mkdir(exist_ok=True)
            (folder / SCRIPT_ENDED).unlink(missing_ok=True)
            error_files[local_rank] = env[ERROR_FILE] = str(folder / processes.ERROR_REPORT)
            if self._log_dir is not None:
                stdouts[local_rank] = str(self._log_dir / f"{self._started}_rank{env['RANK']}{again}.log")
                # Standard error stays inherited: the shim merges it into standard output, in one file, in order.
            elif self._output is not None:
                stdouts[local_rank], stderrs[local_rank] = self._output.pipes(local_rank, env["RANK"])
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=error_files)


class Supervisor(LocalElasticAgent):
    """torch's agent with a time limit on stopping and a record of when each rank ended."""

    def __init__(
        self, job: NodeJob, run_dir: Path, rendezvous: RendezvousHandler | None = None, max_restarts: int = 0
    ) -> None:
        if rendezvous is None and job.nodes == 1:
            rendezvous = SingleMachineRendezvous(job.master_addr, job.master_port)
        elif rendezvous is None:
            where = (job.master_addr, job.master_port, job.node_rank, job.nodes)
            rendezvous = StaticTCPRendezvous(*where, run_id="deepspeed", timeout=600)
        spec = WorkerSpec(
            role="default",
            local_world_size=job.ranks,
            rdzv_handler=rendezvous,
            entrypoint=job.command[0],
            args=tuple(
                argument.replace("$", "$$") for argument in job.command[1:]
            ),  # the agent expands macros
            max_restarts=max_restarts,
        )
        self.output = PrefixedOutput(run_dir) if job.prefix_output else None
        super().__init__(spec, RankFiles(run_dir, job.log_dir, self.output))
        self.watch = processes.ExitWatch({})
        self.run_dir = run_dir
        self.stopped_at: float | None = None  # when the agent began to stop ranks
        self._ended_well: dict[int, float] = {}  # rank -> time at which its script ended without a failure

    def failures(self, result: RunResult) -> list[Failure]:
        """Return the failures of the ranks, the cause first, after their output has been forwarded."""
        return causes_first(self.entries(result))

    def entries(self, result: RunResult | None) -> list[Failure]:
        """Return an entry for each rank that failed, and for each that ended without a failure before the others were
        stopped."""
        if self.output is not None:
            self.output.drain()
        failures = [
            Failure.of(rank, process, self.watch.ended_at.get(process.local_rank), self.stopped_at)
            for rank, process in (result.failures if result is not None else {}).items()
        ]
        return [*failures, *(Failure.by_leaving(rank, at) for rank, at in self._ended_well.items())]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers: dict[int, Any] = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context = self._pcontext
        assert context is not None
        # The agent waits up to 30 s for its processes when it closes them: too long after a Ctrl-C.
        object.__setattr__(context, "close", functools.partial(self._close, context, context.close))
        with processes.holding_signals():  # torch's handlers, now installed, raise
            self.watch = processes.ExitWatch(context.pids())
            self._ended_well = {}
            processes.end_failed_ranks(self.run_dir, context.pids(), self.watch.ended_at)
        return workers

    def _close(self, context: Any, close: Any, death_sig: Any = None, timeout: float = 30) -> None:
        self.stopped_at = self.stopped_at or time.time()
        # Without a signal, a rank has failed: a collective save is no longer possible, so no grace is granted for it.
        grace = processes.grace_seconds(os.getpid() if death_sig is not None else None)
        close(death_sig, min(timeout, grace))
        _list_stopped(context)
        for worker in self._worker_group.workers:
            ended_at = self._ended_well_at(worker.local_rank, context)
            if ended_at is not None and ended_at < self.stopped_at:
                self._ended_well[worker.global_rank] = ended_at

    def _ended_well_at(self, local_rank: int, context: Any) -> float | None:
        """Return the time, in seconds since the epoch, at which a rank's script ended without a failure; None if it did
        not. A program that is not a Python script counts by its exit code."""
        try:
            return float((self.run_dir / str(local_rank) / SCRIPT_ENDED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            done = context.subprocess_handlers[local_rank].proc.poll() == 0
            return self.watch.ended_at.get(local_rank) if done else None


def _list_stopped(context: Any) -> None:
    """Add the ranks that the agent has just stopped to the failures, as newer releases of torch do: 2.6 lists only
    ranks that had ended before it stopped the others."""
    for local_rank, handler in context.subprocess_handlers.items():
        exit_code = handler.proc.poll()
        if exit_code and local_rank not in context._failures:
            context._failures[local_rank] = ProcessFailure(
                local_rank=local_rank,
                pid=handler.proc.pid,
                exitcode=exit_code,
                error_file=context.error_files[local_rank],
            )


def supervise(job: NodeJob, make: Callable[[NodeJob, Path], Supervisor] = Supervisor) -> int:
    """Run the ranks until they end; return the exit code of the first that failed, 128 + signal, or 0."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic") and not logger.isEnabledFor(logging.DEBUG):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with processes.own_folder() as run_dir:
        return _run(job, make(job, run_dir))


def _run(job: NodeJob, supervisor: Supervisor) -> int:
    exit_code = 1
    result: Any = None
    try:
        result = supervisor.run()
        exit_code = _report(job, result, supervisor) if result.is_failed() else 0
    except DistNetworkError as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"no rendezvous at {job.master_addr}:{job.master_port}: {reason}") from None
    except SignalException as stop:
        exit_code = 128 + stop.sigval
        logger.warning("stopped by %s", stop.sigval.name)
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)  # the rest is short and must not be interrupted
        if exit_code:
            processes.kill_descendants()
        if supervisor.output is not None:
            supervisor.output.drain()
        if job.report is not None:
            write_report(job.report, supervisor.entries(result))
    return exit_code


def _report(job: NodeJob, result: RunResult, supervisor: Supervisor) -> int:
    """Report the rank that failed first and why, and the others in one line each; return the exit code.

    If ``job.report`` is set, the command that started the machines reports the ranks of all of them together.
    """
    failures = supervisor.failures(result)
    if job.report is not None:
        return failures[0].command_exit_code
    if job.nodes > 1 and failures[0].lost_peer:  # the traceback that matters is on another machine
        failures[0] = replace(failures[0], traceback="")
    show(job.script, failures, log_dir=job.log_dir, adds_local_rank=job.adds_local_rank)
    return failures[0].command_exit_code


# ``--prefix_output``: each line that a rank prints begins with its rank.
#
# A rank's streams are named pipes, which torch's agent opens like files; a thread per pipe forwards its data line by
# line, so that lines of several ranks do not mix. A carriage return ends a line, too: progress bars rewrite theirs.


CHUNK = 1 << 16
DRAIN_S = 0.5  # wait for the output of ended ranks; processes that they left behind may keep the pipes open
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])")


class PrefixedOutput:
    """Output pipes of the ranks of one machine, whose lines get the rank as a prefix."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads: list[threading.Thread] = []

    def pipes(self, local_rank: int, rank: str) -> tuple[str, str]:
        """Create the pipes for one start of a rank; return the paths for its standard output and error."""
        return (
            self._pipe(self._folder / str(local_rank) / "stdout", sys.stdout, rank),
            self._pipe(self._folder / str(local_rank) / "stderr", sys.stderr, rank),
        )

    def drain(self) -> None:
        """Wait until the output of ended ranks has been printed, at most ``DRAIN_S`` per pipe."""
        for thread in self._threads:
            thread.join(DRAIN_S)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _pipe(self, path: Path, sink: Any, rank: str) -> str:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a blocking open would wait for the rank
        prefix = f"[rank {rank}] ".encode()
        thread = threading.Thread(target=_carry, args=(source, sink, prefix), daemon=True)
        self._threads.append(thread)
        thread.start()
        return str(path)


def _carry(source: int, sink: Any, prefix: bytes) -> None:
    """Forward lines until the last writer has closed the pipe. The poll waits for the first writer (Linux), before
    which a read would return end of file."""
    poller = select.poll()
    poller.register(source, select.POLLIN)
    poller.poll()
    os.set_blocking(source, True)
    left = b""
    while chunk := os.read(source, CHUNK):
        left += chunk
        end = 0
        for line in _LINE.finditer(left):
            sink.buffer.write(prefix + line[0])
            end = line.end()
        left = left[end:]
        sink.flush()
    if left:
        sink.buffer.write(prefix + left + b"\n")
        sink.flush()
    os.close(source)
