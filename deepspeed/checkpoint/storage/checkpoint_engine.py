"""Interface of engines that store the files of a checkpoint."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class CheckpointCommitInfo:
    """The checkpoint that a sequence of ``save`` calls belongs to."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Stores files: ``create(info)``, any number of ``save``, ``commit(info)``; ``load`` at any time."""

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params
        self._commit_info: CheckpointCommitInfo | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Store one file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of one file."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """End a checkpoint whose files have all been saved; True once they are durable."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_decoupled(self) -> bool:
        """Return whether ``save`` returns before the file is durable."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        self._commit_info = info

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        return self._commit_info

    def cleanup(self) -> None:  # noqa: B027 - engines that hold nothing need not override it
        """Release the engine's resources."""
