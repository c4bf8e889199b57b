"""Checkpoint errors, with messages that name the file and the remedy."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read, or fitted to the model; the message says which file and why."""


class FailedElsewhere(CheckpointError):
    """Another rank could not do its part; that rank has said why."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A folder or file that a checkpoint needs is missing."""


class CheckpointTagError(CheckpointError, AssertionError):
    """A tag cannot name a folder, or ranks give different ones. An AssertionError, too, as release 0.19 raises it."""


class CheckpointDegreesError(CheckpointError, RuntimeError):
    """Files of one checkpoint record different degrees of parallelism. A RuntimeError, too, as in release 0.19."""
