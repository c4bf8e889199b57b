"""Names that requests may give as their model. Pure."""

from __future__ import annotations

import time
from typing import Any


class ModelError(ValueError):
    """A request names a model that is not there."""


class Models:
    """The model of a server.

    Args:
        name: in requests and answers.
        max_length: tokens of a prompt and its answer.
    """

    def __init__(self, name: str, max_length: int) -> None:
        self.name = name
        self._max_length = max_length
        self._began = int(time.time())

    def check(self, name: str) -> None:
        """ModelError: there is no model of this name; an empty one stands for the server's."""
        if name and name != self.name:
            raise ModelError(f"there is no model {name!r}, only {self.name!r}")

    def described(self) -> list[dict[str, Any]]:
        """Return the models as ``/v1/models`` lists them."""
        return [self._entry(self.name)]

    def one(self, name: str) -> dict[str, Any]:
        """ModelError: there is no model of this name."""
        self.check(name)
        return self._entry(name)

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "deepspeed",
            "root": self.name,
            "parent": None,
            "max_model_len": self._max_length,
        }
