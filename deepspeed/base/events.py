"""Events of the engine, to which observers subscribe: profilers, monitors, timers, schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EVENTS = (
    "before_forward",
    "after_forward",
    "before_backward",
    "before_reduction",  # gradients are computed; the exposed part of their reduction follows
    "after_backward",
    "before_step",
    "at_boundary",
    "after_step",
    "after_update",  # follows the "after_step" of a boundary, also if the update was skipped
    "on_save",
    "on_load",
    "on_error",  # an exception ends the batch
    "on_destroy",
)


class Events:
    """Ordered subscribers per event. Emitting an event without subscribers costs one dict look-up."""

    def __init__(self) -> None:
        self._subscribers: dict[str, list[Callable[..., Any]]] = {}

    def on(self, event: str, subscriber: Callable[..., Any]) -> None:
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}; the events are {', '.join(EVENTS)}")
        self._subscribers.setdefault(event, []).append(subscriber)

    def off(self, event: str, subscriber: Callable[..., Any]) -> None:
        """Remove a subscriber; one that is being notified may remove itself."""
        left = list(self._subscribers[event])
        left.remove(subscriber)
        self._subscribers[event] = left

    def emit(self, event: str, **details: Any) -> None:
        subscribers = self._subscribers.get(event)
        if subscribers:
            for subscriber in subscribers:
                subscriber(**details)
