"""Track the active ``zero.Init`` contexts, so that ``initialize`` can suspend them without importing stage 3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class ActiveContexts:
    """Patches of the active contexts (process-wide by nature): a stack whose innermost context is in effect."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []  # each a ``zero.Init``
        self.restores: list[Callable[[], None]] = []
        self.suspended = 0
        self.composing = 0
        """Depth of running constructors of torch's own classes (Note: torch's composites)."""

    def unpatch(self) -> None:
        """Restore every patched name."""
        while self.restores:
            self.restores.pop()()

    def suspend(self) -> None:
        """Leave modules and tensors created until ``resume`` unpartitioned; calls nest."""
        self.suspended += 1
        self.unpatch()

    def resume(self) -> None:
        """Undo one ``suspend``."""
        self.suspended = max(0, self.suspended - 1)
        if self.contexts and not self.suspended:
            self.contexts[-1].patch_init_and_builtins()

    @contextlib.contextmanager
    def suspending(self) -> Iterator[None]:
        """Suspend partitioning of modules and tensors inside the block."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()


active_contexts = ActiveContexts()
