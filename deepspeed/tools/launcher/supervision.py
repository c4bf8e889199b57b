"""Supervision of a command that starts ranks: signal forwarding, and clean-up when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from deepspeed.tools.launcher import processes
from deepspeed.tools.launcher.errors import logger

RUNNER_PID = "DEEPSPEED_RUNNER_PID"  # the process whose end must end the launcher
NODE_REPORT = "DEEPSPEED_NODE_REPORT"  # file to which a launcher writes its failures instead of logging them
RESTART_SIGNAL = signal.SIGUSR1  # to an elastic launcher: a machine was lost, which its ranks may not notice
LAST_RESORT_S = 1.75  # time for the launcher to exit after it has killed its ranks


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    listen: Callable[[Callable[[int], None]], None] | None = None,
    what: str = "the launcher",
    ends_by: int | None = None,
    stdin: int | None = None,
    errors_to: Callable[[bytes], None] | None = None,
) -> int:
    """Run the launcher and forward signals to it; return its exit code once no process of the job is left.

    ``listen``: called with a function that sends the launcher a signal, for requests that do not arrive as signals.
    ``what``: the command's name in messages. ``ends_by``: signal to send instead of the received one, for commands that
    only end by it. ``stdin``: as for `subprocess`. ``errors_to``: receives the launcher's standard error in chunks;
    by default it is inherited.
    """
    processes.adopt_orphans()
    not_ours = processes.own_children()
    # In its own session, the launcher gets Ctrl-C from this process only, not from the terminal as well.
    process = subprocess.Popen(
        command,
        env={**(os.environ if environment is None else environment), RUNNER_PID: str(os.getpid())},
        stdin=stdin,
        stderr=None if errors_to is None else subprocess.PIPE,
        start_new_session=True,
        preexec_fn=processes.end_with_us(),
    )
    requests = _Requests(process, ends_by)
    reader = None if errors_to is None else _reader(process, errors_to)
    if listen is not None:
        listen(requests.forward)
    with processes.handled_by(requests.forward):
        code = process.wait()
        if code < 0 and (not requests.received or code == -signal.SIGKILL):
            logger.error("%s was terminated by %s; stopping its ranks", what, signal.Signals(-code).name)
        if code != 0:
            processes.kill_descendants(not_ours)
        if code < 0:
            for left_behind in processes.folders_of(process.pid):
                processes.remove(left_behind)
        if reader is not None:
            reader.join(timeout=LAST_RESORT_S)
    # After a request, a death by another signal (killed after the timeout, or aborted by Python) is not the reason.
    if code < 0 and requests.received:
        return 128 + requests.received[0]
    return code if code >= 0 else 128 - code


class _Requests:
    """Forwards signals to the launcher, and kills it if it does not end in time. ``received``: requests to end."""

    def __init__(self, process: subprocess.Popen[bytes], ends_by: int | None) -> None:
        self.received: list[int] = []
        self._process = process
        self._ends_by = ends_by

    def forward(self, signum: int, frame: FrameType | None = None) -> None:
        process = self._process
        if signum == RESTART_SIGNAL:  # not a request to end
            process.send_signal(signum)
            return
        self.received.append(signum)
        process.send_signal(signum if self._ends_by is None else self._ends_by)
        last_resort = threading.Timer(processes.grace_seconds(process.pid) + LAST_RESORT_S, process.kill)
        last_resort.daemon = True
        last_resort.start()


def _reader(process: subprocess.Popen[bytes], errors_to: Callable[[bytes], None]) -> threading.Thread:
    def read() -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            while chunk := os.read(stream.fileno(), 65536):
                errors_to(chunk)

    thread = threading.Thread(target=read, name="standard error", daemon=True)
    thread.start()
    return thread
