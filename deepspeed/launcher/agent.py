"""Supervision of one machine's ranks: torch's elastic agent, with the launcher's rules for ending a job.

The agent starts the ranks, each in its own session, monitors them, and stops the others when one fails.
Added here: which rank failed first and why, a bound on the time it takes to stop, and no process left behind.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from deepspeed.constants import RANK_ENDED
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.processes import (
    ERROR_REPORT,
    ExitWatch,
    end_failed_ranks,
    grace_seconds,
    holding_signals,
    kill_descendants,
    run_dir_prefix,
)
from deepspeed.launcher.shim import ERROR_FILE, LOCAL_RANK_OPTION, USAGE_ERROR

logger = logging.getLogger("deepspeed.launcher")

MESSAGE_LENGTH = 400
# Text of exceptions raised because another rank is gone: ours, gloo's, NCCL's and the store's.
_OF_A_PEER = re.compile(
    rf"{RANK_ENDED}|gloo/transport|Connection (was )?(likely )?(closed|reset)|Broken pipe"
    r"|\bDist(Backend|Network|Store)Error",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJob:
    """What one machine runs."""

    command: tuple[str, ...]  # program and arguments of every rank; ranks differ only in their environment
    ranks: int  # on this machine
    node_rank: int
    nodes: int
    master_addr: str
    master_port: int
    log_dir: Path | None  # holds one file per rank, instead of this process's output
    adds_local_rank: bool = False  # the shim gives each rank a --local_rank=N
    script: str  # for messages


class OneMachine(RendezvousHandler):
    """A rendezvous without peers: the agent needs no server, and the port stays free for rank 0 to listen on."""

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
        """No other agent could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class RankFiles(LogsSpecs):
    """Where each rank writes: its error report always, its output only if a log folder is given."""

    def __init__(self, run_dir: Path, log_dir: Path | None) -> None:
        super().__init__()
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._started = time.strftime("%Y%m%d%H%M%S")

    @property
    def root_log_dir(self) -> str:
        return str(self._run_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        error_files, stdouts = {}, dict.fromkeys(envs, "")
        for local_rank, env in envs.items():
            folder = self._run_dir / str(local_rank)
            folder.mkdir(exist_ok=True)
            error_files[local_rank] = env[ERROR_FILE] = str(folder / ERROR_REPORT)
            if self._log_dir is not None:
                stdouts[local_rank] = str(self._log_dir / f"{self._started}_rank{env['RANK']}.log")
        # Standard error stays inherited here: the shim merges it into standard output, in one file, in order.
        return LogsDest(stdouts=stdouts, stderrs=dict.fromkeys(envs, ""), error_files=error_files)


class Supervisor(LocalElasticAgent):
    """torch's agent with a bound on how long stopping takes and a record of when each rank ended."""

    def __init__(self, job: NodeJob, run_dir: Path) -> None:
        if job.nodes == 1:
            rendezvous: RendezvousHandler = OneMachine(job.master_addr, job.master_port)
        else:
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
            max_restarts=0,
        )
        super().__init__(spec, RankFiles(run_dir, job.log_dir))
        self.watch = ExitWatch({})
        self.run_dir = run_dir
        self.stopped_at: float | None = None  # when the agent began to stop ranks

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers: dict[int, Any] = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context = self._pcontext
        assert context is not None
        # When the agent closes its processes it waits up to 30 s for them: too long for a Ctrl-C.
        object.__setattr__(context, "close", functools.partial(self._close, context, context.close))
        with holding_signals():  # from here on torch's handlers raise
            self.watch = ExitWatch(context.pids())
            end_failed_ranks(self.run_dir, context.pids(), self.watch.ended_at)
        return workers

    def _close(self, context: Any, close: Any, death_sig: Any = None, timeout: float = 30) -> None:
        self.stopped_at = self.stopped_at or time.time()
        close(death_sig, min(timeout, grace_seconds()))
        _list_stopped(context)


def _list_stopped(context: Any) -> None:
    """Count the ranks that the agent has just stopped among those that failed, as newer releases of torch do: 2.6 lists
    only those that had ended by themselves when it looked."""
    for local_rank, handler in context.subprocess_handlers.items():
        exit_code = handler.proc.poll()
        if exit_code and local_rank not in context._failures:
            context._failures[local_rank] = ProcessFailure(
                local_rank=local_rank,
                pid=handler.proc.pid,
                exitcode=exit_code,
                error_file=context.error_files[local_rank],
            )


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    at: float  # seconds since the epoch
    exit_code: int  # negative: minus the signal that ended it
    message: str  # the exception in one line; empty if it left none
    traceback: str
    first: bool  # among the ranks ended by an exception, by their own account
    on_screen: bool  # the rank printed its traceback itself
    lost_peer: bool = False  # its message says that it failed because another rank had
    stopped: bool = False  # by the agent, because another rank had failed

    @classmethod
    def of(
        cls, rank: int, process: ProcessFailure, ended_at: float | None, stopped_at: float | None = None
    ) -> Failure:
        """Read from the rank's error file if an exception was the cause, else from its exit code."""
        report: dict[str, Any] = {}
        try:
            report = json.loads(Path(process.error_file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass
        inner: Any = report.get("message", {})
        inner = inner if isinstance(inner, dict) else {"message": str(inner)}
        # A rank that reported an exception may be slow to end, and be stopped meanwhile like the others.
        exit_code = report.get("exit_code", 1) if report and process.exitcode < 0 else process.exitcode
        message = str(inner.get("message", ""))
        # A killed process loses its connections before it counts as ended: a rank that notices did not fail first.
        lost_peer = _OF_A_PEER.search(str(report.get("origin") or message)) is not None
        raised_at = None if ended_at and lost_peer else report.get("time")
        late = stopped_at is not None and (ended_at or process.timestamp + 1.0) >= stopped_at
        return cls(
            rank=rank,
            # The agent's own time is truncated to whole seconds: use the end of that second, to err on the late side.
            at=raised_at or ended_at or process.timestamp + 1.0,
            exit_code=exit_code,
            message=_in_one_line(message),
            traceback=inner.get("extraInfo", {}).get("py_callstack", ""),
            first=report.get("first", False),
            on_screen=report.get("on_screen", False),
            lost_peer=lost_peer,
            stopped=late and not report and -process.exitcode in (signal.SIGTERM, signal.SIGKILL),
        )

    @property
    def command_exit_code(self) -> int:
        """What a shell would report: 128 + N for signal N."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    @property
    def how(self) -> str:
        if self.exit_code >= 0:
            code = f"exit code {self.exit_code}"
            return f"{self.message} ({code})" if self.message else code
        hint = ", perhaps because memory ran out" if self.exit_code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-self.exit_code).name}{hint} (exit code {self.command_exit_code})"


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """Causes before effects, each by time: ranks that lost a peer come late, those stopped by the agent last.

    Of two exceptions in the same millisecond, the one whose rank printed its traceback comes first.
    """
    failures = list(failures)
    printed = [failure.at for failure in failures if failure.first and not failure.lost_peer]

    def moment(failure: Failure) -> tuple[bool, bool, float, bool]:
        has_report = bool(failure.traceback) and bool(printed)
        at = max(failure.at, *printed) if has_report else failure.at
        return failure.stopped, failure.lost_peer, at, not failure.first

    return sorted(failures, key=moment)


def _is_refused_option(failure: Failure) -> bool:
    """Whether a script may have failed on its arguments: argparse and click exit with 2, others name the option."""
    return failure.exit_code == USAGE_ERROR or LOCAL_RANK_OPTION in failure.message


def _in_one_line(message: str) -> str:
    """The first line of an exception's text, with the second if the first only announces it."""
    first, *others = message.strip().splitlines() or [""]
    if first.endswith(":") and others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        first = f"{first} {others[0].strip()}{more}"
    return first[:MESSAGE_LENGTH]


def supervise(job: NodeJob) -> int:
    """Runs the ranks until they end; returns the exit code of the first that failed, 128 + signal, or 0."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic") and not logger.isEnabledFor(logging.DEBUG):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    run_dir = Path(tempfile.mkdtemp(prefix=run_dir_prefix(os.getpid())))
    supervisor = Supervisor(job, run_dir)
    exit_code = 1
    try:
        result: Any = supervisor.run()
        exit_code = _report(job, result, supervisor) if result.is_failed() else 0
    except DistNetworkError as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"no rendezvous at {job.master_addr}:{job.master_port}: {reason}") from None
    except SignalException as stop:
        exit_code = 128 + stop.sigval
        logger.warning("stopped by %s", stop.sigval.name)
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)  # the rest takes no time and must not be interrupted
        if exit_code:
            kill_descendants()
        shutil.rmtree(run_dir, ignore_errors=True)
    return exit_code


def _report(job: NodeJob, result: RunResult, supervisor: Supervisor) -> int:
    """Reports which rank failed first and why, and the others in one line each; returns the exit code."""
    ended_at = supervisor.watch.ended_at
    failures = [
        Failure.of(rank, process, ended_at.get(process.local_rank), supervisor.stopped_at)
        for rank, process in result.failures.items()
    ]
    first, *others = in_order(failures)
    lines = [f"rank {first.rank} of {job.script} failed first: {first.how}"]
    ends: dict[str, list[int]] = {}
    for failure in others:
        if failure.stopped:
            end = "stopped by the launcher"
        elif failure.message and failure.message == first.message:
            end = "the same"
        else:
            later = max(failure.at - first.at, 0.0)  # the loss of a peer may be noticed before its end
            end = f"{failure.message or failure.how}, {later:.1f} s later"
        ends.setdefault(end, []).append(failure.rank)
    for end, ranks in ends.items():
        plural = "s" if len(ranks) > 1 else ""
        lines.append(f"  rank{plural} {', '.join(map(str, sorted(ranks)))}: {end}")
    if job.adds_local_rank and _is_refused_option(first):
        lines.append(
            f"  the command gives every rank {LOCAL_RANK_OPTION}=N; if {job.script} does not accept it, start it with: "
            "deepspeed --no_local_rank ..."
        )
    if job.log_dir is not None:
        lines.append(f"  everything that the ranks wrote is in {job.log_dir}{os.sep}*_rank*.log")
    if first.traceback and not first.on_screen:
        sys.stderr.write(first.traceback)
    for failure in others:
        if failure.traceback and not failure.on_screen:
            logger.debug("rank %d:\n%s", failure.rank, failure.traceback)
    logger.error("\n".join(lines))
    return first.command_exit_code
