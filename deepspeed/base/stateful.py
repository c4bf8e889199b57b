"""Client objects whose state is saved in checkpoints: learning-rate schedules and data loaders of any class."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasStateDict(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class LoadsStateDict(Protocol):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def state_of(client: Any) -> dict[str, Any] | None:
    """Return the state of ``client``; None if it is None or has no state."""
    return client.state_dict() if isinstance(client, HasStateDict) else None
