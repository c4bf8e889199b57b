"""Track the newest engine, on which documented functions without an engine argument act."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Newest(Generic[T]):
    """The newest of some objects, held weakly: when it is freed, its predecessor becomes the newest."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[T]] = []

    def add(self, item: T) -> None:
        self.remove(item)
        self._known.append(weakref.ref(item))

    def remove(self, item: T) -> None:
        self._known = [known for known in self._known if known() not in (None, item)]

    def clear(self) -> None:
        self._known.clear()

    def get(self) -> T | None:
        """Return the newest object; None: there is none."""
        while self._known:
            found = self._known[-1]()
            if found is not None:
                return found
            self._known.pop()
        return None
