"""Checkpoint engines that write files for ``torch.load``, and flush them in ``save`` or in ``commit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.files.archive_writer import write_archive, write_errors_at
from deepspeed.checkpoint.files.flush import flush
from deepspeed.checkpoint.storage.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine


class TorchCheckpointEngine(CheckpointEngine):
    """Writes in the format of ``torch.save`` without copying the tensors; files are durable when ``save`` returns.
    Loads with ``weights_only=True``, unless files are trusted (``trusts_files``)."""

    def create(self, info: CheckpointCommitInfo) -> None:
        self.set_commit_info(info)

    def save(self, state_dict: Any, path: str) -> None:
        with write_errors_at(Path(path)):
            write_archive(Path(path), state_dict)
            flush(Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        from deepspeed.checkpoint.files.safe_types import allowed_types, trusts_files

        with allowed_types():
            return torch.load(path, map_location=map_location, weights_only=not trusts_files())

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


# All files of a checkpoint are flushed to disk together, by ``commit``.


class FastCheckpointEngine(TorchCheckpointEngine):
    """Writes tensors directly from their memory, and flushes in ``commit``. ``dp_writer_config`` and
    ``optimize_dp_state``, which spread a replicated file over several writers, have no effect: each rank writes the
    part that it holds."""

    def __init__(self, config_params: Any, dp_writer_config: Any, optimize_dp_state: bool) -> None:
        super().__init__(config_params)
        self.dp_writer_config = dp_writer_config
        self.optimize_dp_state = optimize_dp_state
        self._written: list[Path] = []

    def save(self, state_dict: Any, path: str) -> None:
        with write_errors_at(Path(path)):
            write_archive(Path(path), state_dict)
        self._written.append(Path(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Flush all saved files to disk. CheckpointError: one could not be stored."""
        written, self._written = self._written, []
        for path in written:
            with write_errors_at(path):
                flush(path)
        return True
