"""Phases of a pass, each the purpose of its gathers. The caller that begins a pass sets it once; nothing below reads
the grad mode.

| caller | phase |
|---|---|
| ``engine.forward``, in training mode or training in eval mode (below), if a backward can follow it | FORWARD |
| ``engine.forward`` otherwise: an evaluation, generation | EVALUATION |
| a direct call of one of its modules, in training mode, if a backward can follow it | FORWARD |
| a direct call of one of its modules otherwise | EVALUATION |
| a call inside another call | that of the outer call |
| a hook on an output of a call, when autograd reaches it | BACKWARD (EVALUATION inside an evaluation: forces) |
| a call inside a backward | RECOMPUTATION (EVALUATION or OTHER_THREAD inside those) |
| ``GatheredParameters`` | MANUAL |
| a call on a thread other than the one that runs the steps | OTHER_THREAD |

``engine.eval()`` announces an evaluation. If a backward nevertheless runs through such a pass, the script trains in
eval mode (frozen statistics, no dropout): later passes are FORWARD too, until ``engine.train()`` or ``eval()`` is
called or a pass runs in training mode.

The purpose of a direct call without grad is unknown: reentrant checkpointing runs a module like that, and again in
backward. EVALUATION is safe for it too, since such a pass asks the other ranks first.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Purpose of a gather. ``trains``: it belongs to a training step, which repeats and which every rank runs."""

    trains: bool

    FORWARD = "a training forward", True
    BACKWARD = "autograd runs backward through the model", True
    RECOMPUTATION = "a forward inside backward (activation checkpointing)", True
    EVALUATION = "a forward without a backward: evaluation, generation", False
    MANUAL = "GatheredParameters", False
    OTHER_THREAD = "a forward on a thread other than the training thread", False

    def __init__(self, meaning: str, trains: bool) -> None:
        self.trains = trains  # an attribute, not a property: it is read at every use of a bucket
