"""srun, with the exit code of the rank that failed first.

srun's own code is the largest of all ranks': that of those which Slurm stopped because of the first failure. But it
says how each rank ended, in the order in which they did.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence

from deepspeed.tools.launcher.supervision import supervise

_ENDED = re.compile(r"^srun: error: \S+: tasks? [\d,\-]+: (.+?)\s*$")
_CODE = re.compile(r"Exited with exit code (\d+)")


def code_of(line: str) -> int | None:
    """The exit code of the ranks that a line of srun is about, as a shell tells it; None for any other line."""
    found = _ENDED.match(line)
    if found is None:
        return None
    code = _CODE.fullmatch(found[1])
    if code is not None:
        return int(code[1])
    description = found[1].removesuffix(" (core dumped)")
    for each in signal.Signals:
        if signal.strsignal(each) == description:
            return 128 + each
    return None


class FirstFailure:
    """Hands on what srun writes to standard error, and remembers the first code in it."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._rest = b""

    def __call__(self, chunk: bytes) -> None:
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + chunk)
        for line in lines:
            self.code = self.code if self.code is not None else code_of(line.decode(errors="replace"))


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs it until no process of the job is left; the exit code."""
    first = FirstFailure()
    code = supervise(command, environment, what="srun", errors_to=first)
    return code if code == 0 or first.code is None else first.code
