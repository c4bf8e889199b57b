"""``--prefix_output``: each line that a rank prints begins with its number.

A rank's streams are named pipes, which torch's agent opens like files; a thread for each carries what comes, line by
line, so that lines of several ranks do not mix. A bar that rewrites its line counts as lines, too.
"""

from __future__ import annotations

import os
import re
import select
import sys
import threading
from pathlib import Path
from typing import Any

CHUNK = 1 << 16
DRAIN_S = (
    0.5  # for what ranks have printed to arrive; a process that they left may hold their streams for longer
)
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])")


class Prefixed:
    """The streams of the ranks of one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads: list[threading.Thread] = []

    def pipes(self, local_rank: int, rank: str) -> tuple[str, str]:
        """Paths for a rank's standard output and error, of one start of it."""
        return (
            self._pipe(self._folder / str(local_rank) / "stdout", sys.stdout, rank),
            self._pipe(self._folder / str(local_rank) / "stderr", sys.stderr, rank),
        )

    def drain(self) -> None:
        """Returns when all has been printed that ranks which have ended wrote."""
        for thread in self._threads:
            thread.join(DRAIN_S)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _pipe(self, path: Path, sink: Any, rank: str) -> str:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else it would wait for the rank
        prefix = f"[rank {rank}] ".encode()
        thread = threading.Thread(target=_carry, args=(source, sink, prefix), daemon=True)
        self._threads.append(thread)
        thread.start()
        return str(path)


def _carry(source: int, sink: Any, prefix: bytes) -> None:
    """Until the last process that holds the pipe has ended. Before the first has opened it, a read would find its end,
    while this waits (Linux)."""
    comes = select.poll()
    comes.register(source, select.POLLIN)
    comes.poll()
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
