"""Client objects whose state is saved in checkpoints: learning-rate schedules and data loaders of any class."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Saves(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class Loads(Protocol):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def state_of(kept: Any) -> dict[str, Any] | None:
    """Return the state of ``kept``; None if it is None or has no state."""
    return kept.state_dict() if isinstance(kept, Saves) else None
