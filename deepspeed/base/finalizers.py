"""Work that a finalizer puts off, as the garbage collector may call it at any time."""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


def call_when_dropped(owner: object, function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function`` in a thread of its own once ``owner`` is gone, but not at the end of the process.

    The collector may interrupt any code, also code that holds a lock of ``threading`` or of the owner's parts. So
    nothing is done there but starting a thread without ``threading``. In a forked process, which shares files and
    sockets with this one, nothing is called.
    """
    weakref.finalize(owner, _call, os.getpid(), function, arguments).atexit = False


def _call(process: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        _thread.start_new_thread(_start, (function, arguments))


def _start(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=function, args=arguments, name="finalizer", daemon=True).start()
