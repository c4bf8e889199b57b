"""Names that requests may give as their model. Pure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from deepspeed.base.exceptions import ExplainedError

_MAX_TOLD = 8

_MAX_ADAPTERS = 64
"""Each keeps memory until it is removed."""


class ModelError(ExplainedError, ValueError):
    """A request names a model that is not there."""


class Models:
    """The model of a server, and its adapters; methods may be called from any thread.

    Args:
        name: in requests and answers.
        max_length: tokens of a prompt and its answer.
        load: makes an adapter of a folder; None: there are none.
    """

    def __init__(self, name: str, max_length: int, load: Callable[[str], Any] | None = None) -> None:
        self.name = name
        self._max_length = max_length
        self._began = int(time.time())
        self._load = load
        self._adapters: dict[str, tuple[str, Any]] = {}  # name -> (folder, adapter)
        self._loading: set[str] = set()
        self._lock = threading.Lock()  # of both

    def add(self, name: str, folder: str, *, anew: bool = False) -> None:
        """Load an adapter. ``anew``: in place of one of this name; requests that have begun keep the one they began
        with. ValueError: the name is taken, there are too many, or the folder holds none for this model."""
        if self._load is None:
            raise ValueError("this server takes no adapters: they need a model on one rank")
        with self._lock:
            self._reserve(name, anew)
        try:
            self._adapters[name] = folder, self._load(folder)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder}: {error}") from error
        finally:
            with self._lock:
                self._loading.discard(name)

    def _reserve(self, name: str, anew: bool) -> None:
        taken = name in (self.name, *self._loading) or (name in self._adapters and not anew)
        if not name or taken:
            raise ValueError(f"the name {name!r} is {'taken' if name else 'empty'}")
        known = self._loading | self._adapters.keys()
        if name not in known and len(known) >= _MAX_ADAPTERS:
            raise ValueError(f"there are {len(known)} adapters, the most that are kept: unload one first")
        self._loading.add(name)

    def remove(self, name: str) -> None:
        """ModelError: there is no such adapter. Requests that have begun are finished with it."""
        if self._adapters.pop(name, None) is None:
            raise ModelError(f"there is no adapter {name!r}")

    def find(self, name: str) -> Any:
        """Return the adapter of this name, None for the model itself. ModelError: see ``check``."""
        known = self._adapters.get(name)
        if known is None and name not in ("", self.name):
            there = ", ".join(map(repr, [self.name, *list(self._adapters)][:_MAX_TOLD]))
            raise ModelError(f"there is no model {name!r}, only {there}")
        return None if known is None else known[1]

    def check(self, name: str) -> None:
        """ModelError: there is no model of this name; an empty one stands for the server's."""
        self.find(name)

    def described(self) -> list[dict[str, Any]]:
        """Return the models as ``/v1/models`` lists them."""
        return [self._entry(name) for name in (self.name, *list(self._adapters))]

    def one(self, name: str) -> dict[str, Any]:
        """ModelError: there is no model of this name."""
        self.check(name)
        return self._entry(name)

    def _entry(self, name: str) -> dict[str, Any]:
        folder, _ = self._adapters.get(name, (self.name, None))
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "deepspeed",
            "root": folder,
            "parent": None if name == self.name else self.name,
            "max_model_len": self._max_length,
        }
