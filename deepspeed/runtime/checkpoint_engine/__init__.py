"""How single files of a checkpoint are stored: the documented pluggable interface."""

from .checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from .torch_checkpoint_engine import TorchCheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]
