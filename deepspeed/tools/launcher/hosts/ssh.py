"""The built-in launcher for several machines: one ssh connection to each, and no other program.

Each connection runs `deepspeed.tools.launcher.hosts.remote`. Output comes back line by line, prefixed with the host
name; failures of ranks come back as data, so that the root cause is reported once, and first.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from deepspeed.base.constants import TIME_IS_UP
from deepspeed.tools.launcher.errors import logger
from deepspeed.tools.launcher.failures import Failure, causes_first, read_report, show
from deepspeed.tools.launcher.hosts.remote import MARK
from deepspeed.tools.launcher.processes import (
    end_with_us,
    grace_seconds,
    handled_by,
    kill_descendants,
    own_children,
)
from deepspeed.tools.launcher.supervision import LAST_RESORT_S, RESTART_SIGNAL

CONNECTION_FAILED = 255  # ssh's own exit code
RETRY_S = 10.0  # delay before an elastic job tries a lost machine again
SETTLE_S = 0.5  # time for machines to notice on their own that a rank elsewhere has failed
OPTIONS = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o",
    "ServerAliveCountMax=3",
)  # fmt: skip


@dataclass
class SshNode:
    """One machine of a job: the arguments to launch it with and, once it has ended, the outcome."""

    host: str
    arguments: Sequence[str]
    local: bool = False
    entries: list[Failure] = field(default_factory=list)  # its ranks that failed or left
    exit_code: int | None = None
    ended_at: float = 0.0
    stopped: bool = False  # it was asked to end
    given_up: bool = False  # an elastic job continued without it

    @property
    def failed_ranks(self) -> bool:
        return not all(entry.departed for entry in self.entries)


@dataclass(frozen=True, kw_only=True)
class RemoteJob:
    """The settings of a job that all machines share."""

    script: str
    environment: Mapping[str, str]
    ssh_options: Sequence[str] = ()
    port: int | None = None
    venv_script: str | None = None
    adds_local_rank: bool = True
    log_dir: str | None = None
    folder: str = field(default_factory=os.getcwd)
    min_nodes: int = 0  # fewest machines with which an elastic job continues; 0: not elastic

    def command(self, node: SshNode) -> list[str]:
        """Return the command that starts the remote end; on this machine, without ssh."""
        start = [sys.executable, "-u", "-m", "deepspeed.tools.launcher.hosts.remote"]
        if node.local and self.venv_script is None:
            return start
        words = " ".join(["exec", *map(shlex.quote, start)])
        if self.venv_script is not None:
            words = f". {shlex.quote(self.venv_script)} && {words}"
        # With this folder and PYTHONPATH, the package need not be installed there.
        path = self.environment.get("PYTHONPATH")
        if path:
            words = f"PYTHONPATH={shlex.quote(path)}; export PYTHONPATH; {words}"
        words = f"cd {shlex.quote(self.folder)} && {words}"
        if node.local:
            return ["/bin/sh", "-c", words]
        port = ["-p", str(self.port)] if self.port is not None else []
        return ["ssh", "-T", *self.ssh_options, *OPTIONS, *port, "--", node.host, words]

    def request(self, node: SshNode) -> bytes:
        """Return the JSON line that the remote end reads first."""
        content: dict[str, Any] = {
            "folder": self.folder,
            "environment": dict(self.environment),
            "arguments": list(node.arguments),
        }
        return json.dumps(content).encode() + b"\n"


class _SshConnection:
    """A running node: its process and the threads that forward its output."""

    def __init__(
        self, job: RemoteJob, node: SshNode, prefix: str, ended: queue.SimpleQueue[_SshConnection | None]
    ) -> None:
        self.node = node
        self._process = subprocess.Popen(
            job.command(node),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_us(),
        )
        self._send(job.request(node))
        streams = [(self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)]
        self._pumps = [
            threading.Thread(target=self._carry, args=(source, sink, prefix.encode()), daemon=True)
            for source, sink in streams
        ]
        for thread in self._pumps:
            thread.start()
        threading.Thread(target=self._wait, args=(ended,), daemon=True).start()

    def ask(self, signum: int) -> None:
        """Ask the remote launcher to end as if by this signal."""
        if self.node.exit_code is None:
            self.node.stopped = True
            self._send(signal.Signals(signum).name.encode() + b"\n")

    def restart(self) -> None:
        """Ask for a restart of the ranks of an elastic job, after the loss of another machine."""
        if self.node.exit_code is None:
            self._send(RESTART_SIGNAL.name.encode() + b"\n")

    def kill(self) -> None:
        """Kill the connection; the remote end stops at the end of its input."""
        if self._process.poll() is None:
            self._process.kill()

    def _send(self, line: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line)
            stdin.flush()
        except OSError:  # the process has ended: its exit code says why
            pass

    def _carry(self, source: IO[bytes], sink: Any, prefix: bytes) -> None:
        mark = MARK.encode()
        for line in source:
            if line.startswith(mark):
                self.node.entries = read_report(line[len(mark) :].decode(errors="replace"), self.node.host)
                continue
            sink.buffer.write(prefix + line)  # one write per line: nodes share the stream
            sink.flush()

    def _wait(self, ended: queue.SimpleQueue[_SshConnection | None]) -> None:
        code = self._process.wait()
        self.node.ended_at = time.time()  # now: processes that it leaves behind may keep its output open
        for thread in self._pumps:
            thread.join()
        self.node.exit_code = code if code >= 0 else 128 - code
        ended.put(self)


def run(job: RemoteJob, nodes: Sequence[SshNode]) -> int:
    """Run the nodes of a job until all have ended; return the exit code of the first rank that failed, or 0."""
    not_ours = own_children()
    ended: queue.SimpleQueue[_SshConnection | None] = queue.SimpleQueue()
    asked: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        ended.put(None)  # wakes the loop below

    with handled_by(on_signal):
        width = max(len(node.host) for node in nodes)

        def connect(node: SshNode) -> _SshConnection:
            return _SshConnection(job, node, f"{node.host:>{width}}: " if len(nodes) > 1 else "", ended)

        running = [connect(node) for node in nodes]
        machines = _Machines(job, running, connect)
        _watch(machines, ended, asked)
    kill_descendants(not_ours)
    if asked:
        logger.warning("stopped by %s", signal.Signals(asked[0]).name)
        return 128 + asked[0]
    return _report(job, [each.node for each in running if not each.node.given_up] or nodes)


class _Machines:
    """The connections of a job, and the machines that an elastic job has lost and will try again."""

    def __init__(
        self, job: RemoteJob, running: list[_SshConnection], connect: Callable[[SshNode], _SshConnection]
    ) -> None:
        self.running = running
        self.retry_at = float("inf")
        self._job = job
        self._connect = connect
        self._away: list[SshNode] = []

    def running_count(self) -> int:
        return sum(each.node.exit_code is None for each in self.running)

    def continues_without(self, node: SshNode) -> bool:
        """Give up a failed machine if the job may continue without it; return whether it does."""
        remaining = self.running_count()
        if (
            not self._job.min_nodes
            or node.stopped
            or remaining < self._job.min_nodes
            or node.exit_code == TIME_IS_UP
        ):
            return False
        node.given_up = True
        logger.warning(
            "%s", _silence_message(node, True) if not node.failed_ranks else f"{node.host}: its ranks failed"
        )
        logger.warning("the job continues with %d machines", remaining)
        for each in self.running:  # their ranks would wait for the lost machine, which sends nothing
            each.restart()
        self._away.append(SshNode(node.host, node.arguments, node.local))
        self.retry_at = time.monotonic() + RETRY_S
        return True

    def reconnect(self) -> None:
        """Reconnect to the lost machines."""
        self.retry_at = float("inf")
        if self.running_count():
            away, self._away = self._away, []
            self.running += [self._connect(node) for node in away]


def _watch(
    machines: _Machines, ended: queue.SimpleQueue[_SshConnection | None], asked: Sequence[int]
) -> None:
    """Wait until all nodes have ended. After a failure or a signal, ask the others to end; after the grace period, kill
    them."""
    running = machines.running
    ending = False
    ask_at = kill_at = float("inf")
    while machines.running_count():
        now = time.monotonic()
        retry_at = float("inf") if ending else machines.retry_at
        try:
            event = ended.get(timeout=max(0.0, min(ask_at, kill_at, retry_at, now + 3600) - now))
        except queue.Empty:
            if time.monotonic() >= retry_at:
                machines.reconnect()
            elif time.monotonic() >= kill_at:
                for connection in running:
                    connection.kill()
                kill_at = float("inf")
            elif time.monotonic() >= ask_at:
                for connection in running:
                    connection.ask(asked[0] if asked else signal.SIGTERM)
                ask_at, kill_at = float("inf"), time.monotonic() + grace_seconds() + LAST_RESORT_S
            continue
        if event is not None and (event.node.exit_code == 0 or machines.continues_without(event.node)):
            continue
        ending = True
        if kill_at == float("inf"):
            ask_at = min(ask_at, time.monotonic() + (SETTLE_S if event is not None else 0.0))


def _report(job: RemoteJob, nodes: Sequence[SshNode]) -> int:
    """Report the first failure over all machines; return its exit code."""
    failures = causes_first(entry for node in nodes for entry in node.entries)
    silent = [node for node in nodes if node.exit_code and not node.failed_ranks and not node.stopped]
    causes = [
        failure for failure in failures if not (failure.lost_peer or failure.stopped or failure.departed)
    ]
    if silent and not causes:  # a machine that could not start, or was lost
        first = min(silent, key=lambda node: node.ended_at)
        for node in silent:
            logger.error(_silence_message(node, bool(failures)))
        assert first.exit_code is not None
        return first.exit_code
    if failures:
        show(job.script, failures, log_dir=job.log_dir, adds_local_rank=job.adds_local_rank)
        return failures[0].command_exit_code
    return next((node.exit_code for node in nodes if node.exit_code), 0)


def _silence_message(node: SshNode, after_start: bool) -> str:
    if node.exit_code == CONNECTION_FAILED and not node.local:
        if after_start:
            return f"{node.host}: the connection was lost"
        return (
            f"{node.host}: ssh could not connect (its message is above). Check 'ssh {node.host} true': it must work "
            "without a password; --ssh_port and --launcher_args pass options to ssh"
        )
    return f"{node.host}: exited with code {node.exit_code} before starting its ranks (its message is above)"
