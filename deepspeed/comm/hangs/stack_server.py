"""Answers `ds stacks`: what every thread of this rank does, and the last collectives of its groups.

An abstract Unix socket with user and process in its name (Linux): nothing lies in a file system, it goes with the
process however that ends, and the kernel says who asks. Only the same user and root get an answer. The asking side is
`deepspeed/tools/stacks.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from deepspeed.base.constants import RANK_SOCKET
from deepspeed.comm.hangs.thread_states import Standing, runs_users_code, stack_of, threads

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_ANSWER_S = 2.0


class StackServer:
    """`serve` waits for questions, in whichever thread calls it; elsewhere than on Linux nobody can ask."""

    def __init__(self, standing: Callable[[], Standing]) -> None:
        self._standing = standing
        self._wake, self._woken = socket.socketpair()
        self._listener: socket.socket | None = None

    def __enter__(self) -> StackServer:
        if sys.platform.startswith("linux"):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind("\0" + RANK_SOCKET.format(user=os.getuid(), process=os.getpid()))
                listener.listen(4)
                self._listener = listener
            except OSError:  # a sandbox without such names
                listener.close()
        return self

    def __exit__(self, *exception: object) -> None:
        for each in (self._listener, self._wake, self._woken):
            if each is not None:
                each.close()

    def wake(self) -> None:
        """End `serve`, from another thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def serve(self, for_s: float) -> None:
        """Answer until this time has passed, or `wake`."""
        end = time.monotonic() + for_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            if self._listener is not None:
                selector.register(self._listener, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                ready = [key.fileobj for key, _ in selector.select(left)]
                if self._woken in ready:
                    return
                if ready and self._listener is not None:
                    with contextlib.suppress(OSError):  # the asking side is gone
                        self._answer(self._listener.accept()[0])

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_ANSWER_S)
            size = _CREDENTIALS.size
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            if _CREDENTIALS.unpack(peer)[1] not in (os.getuid(), 0):
                return
            connection.sendall(json.dumps(self._record()).encode())

    def _record(self) -> dict[str, object]:
        stacks = [
            {"name": name, "stack": stack_of(frames), "of_user": number == 0 or runs_users_code(frames)}
            for number, (name, frames) in enumerate(threads())  # the first is the main one
        ]
        return {**asdict(self._standing()), "threads": stacks}
