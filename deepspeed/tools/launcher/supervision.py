"""Running a command that starts ranks, and leaving nothing behind when it ends or is asked to."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from deepspeed.tools.launcher.processes import (
    adopt_orphans,
    folders_of,
    grace_seconds,
    handled_by,
    kill_descendants,
    own_children,
    remove,
)
from deepspeed.tools.launcher.shim import LINUX, die_with_parent

logger = logging.getLogger("deepspeed.tools.launcher")

RUNNER_PID = "DEEPSPEED_RUNNER_PID"  # names the process with which a launcher must end
NODE_REPORT = "DEEPSPEED_NODE_REPORT"  # file to which a launcher writes its failures instead of telling them
START_ANEW = signal.SIGUSR1  # of an elastic job: a machine is gone, which its ranks may not notice
LAST_RESORT_S = 1.75  # for the launcher to exit after it has killed its ranks


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    asked_by: Callable[[Callable[[int], None]], None] | None = None,
    what: str = "the launcher",
    ends_by: int | None = None,
    stdin: int | None = None,
    errors_to: Callable[[bytes], None] | None = None,
) -> int:
    """Runs the launcher and forwards signals to it; returns the exit code when no process of the job is left.

    ``asked_by`` is given a function that stops the launcher with a signal, for requests that do not come as signals.
    ``what`` is the command's name in messages; ``ends_by`` the only signal that it is sent, if others do not end it;
    ``stdin`` its standard input, as `subprocess` takes it; ``errors_to`` is given what it writes to standard error,
    which it shares with us otherwise.
    """
    adopt_orphans()
    not_ours = own_children()
    process = _start(command, environment, stdin, piped=errors_to is not None)
    requests = _Requests(process, ends_by)
    reader = None if errors_to is None else _reader(process, errors_to)
    if asked_by is not None:
        asked_by(requests.hand_on)
    with handled_by(requests.hand_on):
        code = process.wait()
        if code < 0 and (not requests.asked or code == -signal.SIGKILL):
            logger.error("%s was terminated by %s; its ranks are stopped", what, signal.Signals(-code).name)
        if code != 0:
            kill_descendants(not_ours)
        if code < 0:
            for left_behind in folders_of(process.pid):
                remove(left_behind)
        if reader is not None:
            reader.join(timeout=LAST_RESORT_S)
    # It did not end in time and was killed, or was interrupted where Python can only abort: not why it ended.
    if code < 0 and requests.asked:
        return 128 + requests.asked[0]
    return code if code >= 0 else 128 - code


def _start(
    command: Sequence[str], environment: Mapping[str, str] | None, stdin: int | None, *, piped: bool
) -> subprocess.Popen[bytes]:
    """``piped``: its standard error is read here."""
    # In its own session the launcher gets a Ctrl-C only from us, and not from the terminal as well.
    return subprocess.Popen(
        command,
        env={**(os.environ if environment is None else environment), RUNNER_PID: str(os.getpid())},
        stdin=stdin,
        stderr=subprocess.PIPE if piped else None,
        start_new_session=True,
        preexec_fn=_end_with_this_process(os.getpid()),
    )


class _Requests:
    """Hands signals on to the launcher. ``asked``: those that ask it to end; it is killed if it does not."""

    def __init__(self, process: subprocess.Popen[bytes], ends_by: int | None) -> None:
        self.asked: list[int] = []
        self._process = process
        self._ends_by = ends_by

    def hand_on(self, signum: int, frame: FrameType | None = None) -> None:
        process = self._process
        if signum == START_ANEW:  # no request to end
            process.send_signal(signum)
            return
        self.asked.append(signum)
        process.send_signal(signum if self._ends_by is None else self._ends_by)
        last_resort = threading.Timer(grace_seconds(process.pid) + LAST_RESORT_S, process.kill)
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


def _end_with_this_process(own_pid: int) -> Callable[[], None] | None:
    """Prepare a child before it becomes the command: the kernel ends it when this process ends (Linux)."""
    return (lambda: die_with_parent(own_pid, signal.SIGTERM)) if LINUX else None
