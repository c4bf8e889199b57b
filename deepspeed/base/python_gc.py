"""Garbage collection: ``disable_python_gc``, and what finalizers put off, as the collector may call them at any time.

``disable_python_gc`` collects no cyclic garbage automatically while engines train. A full collection stops a rank for
as long as it takes to look at every object, at a moment of its own; the others wait in the next collective. Reference
counting goes on; cycles are collected when a script asks for it.
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
    """Switches the collector off while somebody holds it, and back on with the last one if it was on before.

    A child that is forked meanwhile has no engines: there the collector is as it was before.
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
        """Collect, and switch the collector off. Returns what ``release`` is given."""
        with self._lock:
            self._switch_off()
            if self._engines == 0 and self._was_on:
                logger.info(
                    f"automatic collection of cyclic garbage is off; {gc.collect()} objects collected"
                )
            self._engines += 1
            return self._process

    def release(self, held: int) -> None:
        """``held``: from ``acquire``; nothing happens in another process than that one's."""
        with self._lock:
            if held == self._process and self._engines:
                self._engines -= 1
                self._switch_on()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No collection inside the block: a full one looks at every object of torch (0.1 s). The block imports modules,
        which stay, or what it makes is gone at its end, and then does not make a collection due."""
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

    def collect(self) -> int:
        """A full collection now; returns the number of objects."""
        return gc.collect()

    def _forked(self) -> None:
        self._lock = threading.RLock()  # a thread that is not in this process may have held it
        if self._engines + self._pauses and self._was_on:
            gc.enable()
        self._engines, self._pauses, self._process = 0, 0, os.getpid()


python_gc_manager = PythonGCManager()


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
