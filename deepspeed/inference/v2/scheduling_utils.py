"""Results of the check whether a batch can be run."""

from __future__ import annotations

from enum import Enum

from deepspeed.base.exceptions import ExplainedError


class SchedulingResult(Enum):
    """Success, or the first limit that stands in the way."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    """More sequences than are tracked at one time."""
    BatchSequenceLimitExceeded = 2
    """More sequences than one forward has."""
    BatchTokenLimitExceeded = 3
    """More tokens than one forward has."""
    KVCacheLimitExceeded = 4
    """More blocks than nobody uses."""
    SequenceTokenLimitExceeded = 5
    """A sequence longer than is possible."""


class SchedulingError(ExplainedError, RuntimeError):
    """A batch was put that cannot be run; ``result`` says why."""

    def __init__(self, result: SchedulingResult) -> None:
        super().__init__(f"the batch cannot be scheduled: {result.name}")
        self.result = result
        self.status = result
