"""Selection of the current activation-checkpointing settings, for engines that may have none.

An engine whose config has no such section uses ``PROCESS``, the process-wide settings; ``checkpointing.py`` is imported
only by code that checkpoints.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class RecomputeSettings(Protocol):
    """Activation-checkpointing settings held by an engine."""

    def keep_layers(self, module: Any) -> None:
        """Offload the inputs of layers that ``module`` checkpoints itself to host memory too, if configured."""

    def leave(self) -> None:
        """Unregister the settings of a destroyed engine: ``checkpointing``'s functions then act on the previous one."""


class _ProcessSettings:
    """Placeholder for the process-wide settings, resolved at use."""

    def keep_layers(self, module: Any) -> None: ...
    def leave(self) -> None: ...


PROCESS: RecomputeSettings = _ProcessSettings()

running: ContextVar[Any] = ContextVar("deepspeed_checkpointing", default=None)
"""Settings of the engine whose forward or recomputation runs; None outside."""

begin_forward = running.set
"""Make an engine's settings current, until ``end_forward`` is called with the returned token."""

end_forward = running.reset
