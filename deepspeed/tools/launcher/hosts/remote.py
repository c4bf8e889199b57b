"""Remote end of the built-in ssh launcher: runs `deepspeed.tools.launcher.launch` on one machine until the connection
ends.

The first line of standard input is a JSON request: environment variables and arguments are kept off the command line,
where other users of the machine could read them. Each later line is the name of a signal for the launcher. End of
input means that the connection or the `deepspeed` command is gone: the launcher is stopped. Failures of ranks are
written to standard error as one marked line, which the command reports together with those of other machines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from deepspeed.tools.launcher import shim
from deepspeed.tools.launcher.processes import own_folder
from deepspeed.tools.launcher.shim import USAGE_ERROR
from deepspeed.tools.launcher.supervision import NODE_REPORT, supervise

MARK = "\0deepspeed failures: "


def main() -> int:
    shim.die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        request = json.loads(sys.stdin.readline())
        os.chdir(request["folder"])
    except (ValueError, KeyError, TypeError):
        print("[deepspeed] error: for use by `deepspeed --launcher ssh` only", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        folder = request["folder"]
        print(
            f"[deepspeed] error: cannot change to {folder}: {error.strerror}. The job runs in the same folder on every "
            "machine",
            file=sys.stderr,
        )
        return USAGE_ERROR
    with own_folder() as folder:
        report = folder / "failures.json"
        environment = {**os.environ, **request["environment"], NODE_REPORT: str(report)}
        command = [sys.executable, "-u", "-m", "deepspeed.tools.launcher.launch", *request["arguments"]]
        code = supervise(
            command, environment, listen=lambda ask: _listen(sys.stdin, ask), stdin=subprocess.DEVNULL
        )
        if report.exists():
            sys.stderr.write(f"{MARK}{report.read_text(encoding='utf-8')}\n")
            sys.stderr.flush()
    return code


def _listen(requests: TextIO, ask: Callable[[int], None]) -> None:
    """Start a thread that passes the requested signals to ``ask``, and SIGTERM at the end of input."""

    def listen() -> None:
        for line in requests:
            ask(signal.Signals[line.strip()])
        ask(signal.SIGTERM)

    threading.Thread(target=listen, name="requests", daemon=True).start()


def _end(code: int) -> None:
    """Exit without interpreter shutdown, which would wait for standard input: the listening thread holds its lock."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main())
