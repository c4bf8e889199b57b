"""Phases of a pass, for which a gather is. Whoever begins a pass says so, once; nothing below asks the grad mode.

| who enters | phase |
|---|---|
| ``engine.forward``, in training mode or where eval mode is trained in (below), if a backward can follow it | FORWARD |
| ``engine.forward`` otherwise: an evaluation, generation | EVALUATION |
| a module of it that is called by itself, in training mode, if a backward can follow it | FORWARD |
| a module of it that is called by itself otherwise | EVALUATION |
| a call inside another call | that of the outer call |
| a hook on an output of a call, when autograd reaches it | BACKWARD (EVALUATION inside an evaluation: forces) |
| a call inside a backward | RECOMPUTATION (EVALUATION or OTHER_THREAD inside those) |
| ``GatheredParameters`` | MANUAL |
| a call on another thread than the one that takes the steps | OTHER_THREAD |

``engine.eval()`` announces an evaluation. If a backward then goes through a pass all the same, eval mode is trained in
(frozen statistics, no dropout): what follows is FORWARD too, until ``engine.train()`` or ``eval()`` announces something
else or a pass runs in training mode.

Nobody can say what a module called by itself without a record is for: reentrant checkpointing of it runs it so, and
again in backward. EVALUATION is safe for it too: such a pass asks the other ranks first.
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
    MANUAL = "GatheredParameters", False
    OTHER_THREAD = "a forward on another thread than the one that trains", False

    def __init__(self, meaning: str, trains: bool) -> None:
        self.meaning = meaning
        self.trains = trains  # an attribute, not a property: it is read at every use of a bucket
