"""Checkpoint engine that writes files in the background."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.files.archive_writer import write_archive, write_errors_at
from deepspeed.checkpoint.files.flush import WriterThread, flush
from deepspeed.checkpoint.files.snapshot import Snapshot
from deepspeed.checkpoint.storage.checkpoint_engine import CheckpointCommitInfo
from deepspeed.checkpoint.storage.torch_checkpoint_engine import FastCheckpointEngine


class DecoupledCheckpointEngine(FastCheckpointEngine):
    """``save`` copies the state to host memory and returns; a thread writes the copy. ``commit`` waits for it.

    The memory of the copies is reused by later saves, until ``cleanup``."""

    def __init__(self, config_params: Any, dp_writer_config: Any, optimize_dp_state: bool) -> None:
        super().__init__(config_params, dp_writer_config, optimize_dp_state)
        self._writing: list[WriterThread] = []
        self._snapshots: list[Snapshot] = []  # one for each file of a checkpoint, in the order of the files

    def save(self, state_dict: Any, path: str) -> None:
        number = len(self._writing)
        if number == len(self._snapshots):
            self._snapshots.append(Snapshot())
        copied = self._snapshots[number].take({path: state_dict})[path]
        self._writing.append(WriterThread("checkpoint-file", partial(_write, copied, Path(path))))
        self._writing[-1].start()

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Wait until all files are on disk. Raises the exception of a failed write, such as CheckpointError."""
        self._wait()
        return True

    def is_decoupled(self) -> bool:
        return True

    def cleanup(self) -> None:
        """Wait for writes in progress, free the memory of the copies, and raise the exception of a failed write, as
        ``commit`` does."""
        try:
            self._wait()
        finally:
            self._snapshots = []

    def _wait(self) -> None:
        writing, self._writing = self._writing, []
        for each in writing:
            each.join()
        for each in writing:
            each.result()


def _write(content: Any, path: Path) -> None:
    with write_errors_at(path):
        write_archive(path, content)
        flush(path)


# The engine that the config section ``datastates_ckpt`` selects.


class DataStatesCheckpointEngine(DecoupledCheckpointEngine):
    """Writes files in the background, from a copy in host memory."""

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        super().__init__(deepspeed_config, None, False)
        self.rank = rank
