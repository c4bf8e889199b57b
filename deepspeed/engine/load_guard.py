"""Guard against training on the partial state of a failed load.

[Note: after the first write] Names, files and their contents are checked before anything is written. Later errors
(damaged tensors, verified as they are read; a wrong shape; the model's own loading code; another rank's error) leave
the weights and states partly loaded. Verifying everything first would read twice data that exceeds the page cache,
and would find only damage. So the engine refuses to compute and to save until a load succeeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.base.events import Events

_GUARDED = ("before_forward", "before_backward", "before_step")


class LoadGuard:
    """Remembers a failed load; without one it costs nothing, as it is then not subscribed to any event."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._failed: str | None = None
        self._with_optimizer = False

    @contextmanager
    def until_loaded(self, folder: Path, *, optimizer: bool) -> Iterator[None]:
        """Mark the engine half loaded if the block, which writes the state, raises; ``optimizer``: it writes
        optimizer state."""
        try:
            yield
        except BaseException as error:
            if self._failed is None:
                for event in _GUARDED:
                    self._events.on(event, self.refuse)
            self._failed = f"{folder} ({type(error).__name__}: {str(error):.300})"
            self._with_optimizer |= optimizer
            raise
        if self._failed is not None and (optimizer or not self._with_optimizer):
            for event in _GUARDED:
                self._events.off(event, self.refuse)
            self._failed, self._with_optimizer = None, False

    def refuse(self, **_: Any) -> None:
        """Raise CheckpointError if the last load failed."""
        if self._failed is not None:
            with_optimizer = " with its optimizer states" if self._with_optimizer else ""
            from deepspeed.checkpoint.errors import CheckpointError

            raise CheckpointError(
                f"this engine is partially loaded: loading {self._failed} failed after replacing some of "
                f"its weights and states. Load a checkpoint{with_optimizer}, or create a new engine"
            )
