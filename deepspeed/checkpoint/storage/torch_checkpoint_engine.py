"""Files that ``torch.load`` reads, durable when ``save`` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.storage.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine


class TorchCheckpointEngine(CheckpointEngine):
    """Writes in the format of ``torch.save`` without copying the tensors, and loads with
    ``weights_only=True``."""

    def create(self, info: CheckpointCommitInfo) -> None:
        self.set_commit_info(info)

    def save(self, state_dict: Any, path: str) -> None:
        from deepspeed.checkpoint.files.archive_writer import (  # an engine has one from the start
            naming,
            write_archive,
        )
        from deepspeed.checkpoint.files.flush import flush

        with naming(Path(path)):
            write_archive(Path(path), state_dict)
            flush(Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        from deepspeed.checkpoint.files.safe_types import allowed_types, trusts_files

        with allowed_types():
            return torch.load(path, map_location=map_location, weights_only=not trusts_files())

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True
