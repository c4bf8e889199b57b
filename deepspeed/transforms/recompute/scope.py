"""Say whose settings of activation checkpointing are in force, for engines that may have none.

An engine whose config has no such section has the settings of the process: it is content with ``PROCESS``, and what
recomputes (``checkpointing.py``) is imported by whoever checkpoints.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class RecomputeSettings(Protocol):
    """Settings of activation checkpointing that an engine keeps."""

    def keep_layers(self, module: Any) -> None:
        """Inputs of layers that ``module`` checkpoints itself are kept in host memory too, if these settings say so."""

    def leave(self) -> None:
        """Their engine is destroyed: the functions of ``checkpointing`` act on the one before it."""


class _OfProcess:
    """Stands for the settings of the process, whatever they are when they are asked for."""

    def keep_layers(self, module: Any) -> None: ...
    def leave(self) -> None: ...


PROCESS: RecomputeSettings = _OfProcess()

running: ContextVar[Any] = ContextVar("deepspeed_checkpointing", default=None)
"""Those of the engine whose forward, or recomputation, runs; None outside."""

begin_forward = running.set
"""An engine's forward begins: its settings are in force until ``end_forward`` is called with what this returns."""

end_forward = running.reset
