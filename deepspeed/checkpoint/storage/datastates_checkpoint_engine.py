"""The name under which the config section ``datastates_ckpt`` knows saves that do not wait."""

from __future__ import annotations

from typing import Any

from deepspeed.checkpoint.storage.decoupled_checkpoint_engine import DecoupledCheckpointEngine


class DataStatesCheckpointEngine(DecoupledCheckpointEngine):
    """Files that are written while the program continues, from a copy in host memory."""

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        super().__init__(deepspeed_config, None, False)
        self.rank = rank
