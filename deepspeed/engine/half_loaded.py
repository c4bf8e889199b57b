"""Guard against training what a load that failed has left in an engine.

[Note: after the first write] Names, files and what they must hold are checked before anything is written. What is found
later (damaged tensors, which are verified as they are read; another shape; the model's own code; another rank's error)
leaves some of the weights and states loaded. Verifying all of it first would read twice what does not fit into the
system's memory, and would find the damage only. So the engine refuses to compute and to save until a load succeeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.base.events import Events

_GUARDED = ("before_forward", "before_backward", "before_step")


class HalfLoaded:
    """Remembers the load that failed, if one has; nothing is asked in an engine where none has."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._failed: str | None = None
        self._with_optimizer = False

    @contextmanager
    def until_loaded(self, folder: Path, *, optimizer: bool) -> Iterator[None]:
        """In the block the state is written; ``optimizer``: the optimizer's, too. An error leaves it half written."""
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
        """CheckpointError if weights or states are those of a load that failed."""
        if self._failed is not None:
            with_optimizer = " with its optimizer states" if self._with_optimizer else ""
            from deepspeed.checkpoint.errors import CheckpointError

            raise CheckpointError(
                f"this engine is half loaded: loading {self._failed} failed after some of its weights and states had "
                f"been replaced. Load a checkpoint{with_optimizer}, or make a new engine"
            )
