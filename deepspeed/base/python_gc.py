"""Garbage collection: ``disable_python_gc``, and deferred finalizers, which the collector may call at any time.

``disable_python_gc`` turns off automatic collection of cycles while engines train. A full collection stops a rank
while it visits every object, at a different time on each rank, and the others wait in the next collective. Reference
counting continues; a script collects cycles explicitly.
"""

from __future__ import annotations

import _thread
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.base.logging import logger


class PythonGCManager:
    """Disables the collector while it has holders, and re-enables it after the last one if it was enabled before.

    A child process forked meanwhile has no engines, so its collector is restored.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._engines = 0
        self._pauses = 0
        self._was_on = False
        self._process = os.getpid()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    @property
    def active_engines(self) -> int:
        return self._engines

    def acquire(self) -> int:
        """Collect, and disable the collector. Return the token for ``release``."""
        with self._lock:
            self._switch_off()
            if self._engines == 0 and self._was_on:
                logger.info(
                    f"automatic collection of cyclic garbage is off; {gc.collect()} objects collected"
                )
            self._engines += 1
            return self._process

    def release(self, held: int) -> None:
        """Release a holder. ``held``: the token of ``acquire``; a no-op in any other process."""
        with self._lock:
            if held == self._process and self._engines:
                self._engines -= 1
                self._switch_on()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable collection inside the block: a full one visits every object of torch (0.1 s). For blocks that
        import modules, which stay, or whose objects are freed by its end, so that no collection becomes due."""
        with self._lock:
            self._switch_off()
            self._pauses += 1
        process = self._process
        try:
            yield
        finally:
            with self._lock:
                if process == self._process:
                    self._pauses -= 1
                    self._switch_on()

    def _switch_off(self) -> None:
        if self._engines + self._pauses == 0:
            self._was_on = gc.isenabled()
            gc.disable()

    def _switch_on(self) -> None:
        if self._engines + self._pauses == 0 and self._was_on:
            gc.enable()

    def _forked(self) -> None:
        self._lock = threading.RLock()  # a thread that does not exist in this process may have held it
        if self._engines + self._pauses and self._was_on:
            gc.enable()
        self._engines, self._pauses, self._process = 0, 0, os.getpid()


python_gc_manager = PythonGCManager()


def call_when_dropped(owner: object, function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function`` in a new thread once ``owner`` is freed, but not at process exit.

    The collector may interrupt any code, even code that holds a lock of ``threading`` or of the owner's parts. So the
    finalizer only starts a thread, without ``threading``. A forked process, which shares files and sockets with this
    one, calls nothing.
    """
    weakref.finalize(owner, _call, os.getpid(), function, arguments).atexit = False


def _call(process: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        _thread.start_new_thread(_start, (function, arguments))


def _start(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=function, args=arguments, name="finalizer", daemon=True).start()
