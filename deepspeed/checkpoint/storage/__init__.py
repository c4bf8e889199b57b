"""Storage of checkpoint files: the documented pluggable interface."""

from deepspeed.checkpoint.storage.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.checkpoint.storage.torch_checkpoint_engine import TorchCheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]
