"""What a gather is for. Whoever begins a pass says so, once; nothing below asks the grad mode.

| who enters | phase |
|---|---|
| the outermost module call, if a backward can follow it | FORWARD |
| the outermost module call, if none can: not in training mode, or nothing of it is recorded | EVALUATION |
| a call inside another call | that of the outer call |
| a hook on an output of a call, when autograd reaches it | BACKWARD (EVALUATION inside an evaluation: forces) |
| a call inside a backward | RECOMPUTATION (EVALUATION or APART inside those) |
| ``GatheredParameters`` | BY_HAND |
| a call on another thread than the one that takes the steps | APART |

Nobody can say what an outermost call without a record will be for: reentrant checkpointing of a module that is called
by itself runs it so, and again in backward. EVALUATION is safe for it too: such a pass asks the other ranks first.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """``trains``: the gather belongs to a training step, which repeats and which every rank takes."""

    trains: bool

    FORWARD = "a forward of training", True
    BACKWARD = "autograd runs backward through the model", True
    RECOMPUTATION = "a forward inside backward (activation checkpointing)", True
    EVALUATION = "a forward without a backward: evaluation, generation", False
    BY_HAND = "GatheredParameters", False
    APART = "a forward on another thread than the one that trains", False

    def __init__(self, meaning: str, trains: bool) -> None:
        self.meaning = meaning
        self.trains = trains  # an attribute, not a property: it is read at every use of a bucket
