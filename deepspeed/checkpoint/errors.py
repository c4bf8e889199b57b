"""Checkpoint errors, with messages that name the file and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.base.exceptions import ExplainedError


class CheckpointError(ExplainedError, ValueError):
    """A checkpoint cannot be written, read, or fitted to the model; the message says which file and why."""


class FailedElsewhere(CheckpointError):
    """Another rank failed, and reported the reason there."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A folder or file that a checkpoint needs is missing."""


class CheckpointTagError(CheckpointError, AssertionError):
    """A tag cannot name a folder, or ranks pass different tags. Also an AssertionError, as in release 0.19."""


class CheckpointDegreesError(CheckpointError, RuntimeError):
    """Files of one checkpoint record different degrees of parallelism. Also a RuntimeError, as in release 0.19."""


def mixed_saves(
    path: Path, found: Mapping[str, Any] | None, beside: Path, expected: Mapping[str, Any] | None
) -> CheckpointError:
    """Return the error for a file ``path`` that is from another save than the file ``beside``."""
    return CheckpointError(
        f"{path} belongs to {_describe_save(found)}, but {beside} to {_describe_save(expected)}: the folder "
        "mixes files of two saves (an incomplete copy, or a leftover file). Copy all files of one save again"
    )


def _describe_save(save: Mapping[str, Any] | None) -> str:
    return f"the save {save['id']} (global_steps {save['global_steps']})" if save else "a save without an id"


@contextmanager
def malformed_as_errors(folder: Path, written_by: object) -> Iterator[None]:
    """Turn errors from malformed files of release ``written_by`` into a CheckpointError that names the ``folder``."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, MemoryError) as error:
        raise CheckpointError(
            f"{folder}, written by release {written_by}, has an unexpected layout ({type(error).__name__}: "
            f"{str(error):.200}); load_module_only=True may still load the weights"
        ) from error
