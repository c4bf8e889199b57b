"""What a gather is for. The code that begins a pass sets the phase; nothing below checks the grad mode."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    FORWARD = "a forward of training"
    BACKWARD = "autograd runs backward through the model"
    RECOMPUTATION = "a forward inside backward (activation checkpointing)"
    EVALUATION = "a forward without a backward: evaluation, generation"
    BY_HAND = "GatheredParameters"
    APART = "a forward on another thread than the one that trains"

    @property
    def trains(self) -> bool:
        """Whether the gather belongs to a training step, which repeats and which every rank takes."""
        return self in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTATION)
