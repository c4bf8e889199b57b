"""After an out-of-memory error: what the plan says about the run, and the cheapest change that lowers its peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspeed.base.logging import logger

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
"""Parts of the messages of allocators that raise a plain RuntimeError: torch's for the host, and drivers'."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` is that of a failed allocation, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


class OutOfMemoryAdvice:
    """Logs the remedy on the rank that ran out of memory, once per engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.given = False
        engine.events.on("on_error", self.look)

    def look(self, *, error: BaseException | None) -> None:
        if self.given or not is_out_of_memory(error):
            return
        self.given = True
        # The planner, for runs that need its advice.
        from deepspeed.engine.observers.planned_memory import remedy

        try:
            logger.error(remedy(self.engine))
        except Exception as problem:  # advice must not hide the error
            logger.debug(f"no remedy could be planned: {problem}")
