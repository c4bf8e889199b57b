"""Scripts in separate processes, without the seconds that every import of torch takes.

`start([...], env=..., cwd=...)` stands for `subprocess.Popen([sys.executable, ...])` where the process is what a test
is about and its start is not: how it ends, what it prints, what the other processes notice. It is forked from the
server of the test pool, which has imported torch and this package, and then is like any other: it has its environment,
its own `__main__`, exit handlers and exit code. What a start itself does (imports, what libraries read when they are
loaded) is tested with `subprocess`. `DS_TEST_FRESH=1` makes all of them such processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import IO, Any, Protocol

from tests import pool
from tests.pool_rank import Script


class Process(Protocol):
    """The part of `subprocess.Popen` that tests use."""

    pid: int
    returncode: Any

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]: ...
    def kill(self) -> None: ...


def start(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | str | None = None, merged: bool = False
) -> Process:
    """`python ARGUMENTS`, which are `-c CODE` or a file, and more. With `merged`, standard error goes to standard
    output."""
    if pool.wants_fresh() or not hasattr(os, "fork"):
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
        )
    return Forked(arguments, env, cwd, merged)


def run(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | str | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """The same to its end, as `subprocess.run` does it."""
    process = start(arguments, env=env, cwd=cwd)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(arguments), process.returncode, output, errors)


class Forked:
    """A child of the fork server. Its end closes the connection; the server knows its exit code."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path | str | None, merged: bool
    ) -> None:
        self.returncode: int | None = None
        self._server = pool.live_pool()
        self._output = _text_of_a_process()
        self._errors = self._output if merged else _text_of_a_process()
        self._connection, theirs = Pipe()
        files = [theirs.fileno(), self._output.fileno(), self._errors.fileno()]
        with theirs:
            self.pid = self._server.fork(b"script", files)
        self._connection.send(Script(list(arguments), dict(env), str(cwd or os.getcwd())))

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """Return the output once the process has ended. subprocess.TimeoutExpired: it has not, in this many seconds."""
        self._wait(timeout)
        texts = []
        for file in (self._output, self._errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return texts[0], "" if self._errors is self._output else texts[1]

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait(None)

    def _wait(self, timeout: float | None) -> None:
        if self.returncode is not None:
            return
        try:
            ended = self._connection.poll(timeout)
        except OSError:  # it was killed before it read what to do
            ended = True
        if not ended:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        self.returncode = self._server.reap(self.pid)
        self._connection.close()


def _text_of_a_process() -> IO[bytes]:
    return tempfile.TemporaryFile("w+b")
