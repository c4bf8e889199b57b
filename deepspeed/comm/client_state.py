"""Announcement of the process group to the client library for which it was created."""

from __future__ import annotations

import sys
from typing import Any


def tell_accelerate(backend: str) -> None:
    """Complete the state that Accelerate is building while it asks us for a process group.

    If Accelerate finds no accelerator it chooses no backend, lets us choose one, and then takes the missing choice to
    mean "no distributed training": each of several ranks believes that it is the only one and reads all of the data,
    and Transformers computes the batch size for a job of one rank. Accelerate's `PartialState` keeps what it knows in
    one dict per process; while that is being built, it holds `backend` but not yet `num_processes`.
    """
    module = sys.modules.get("accelerate.state")
    state: Any = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    if isinstance(state, dict) and "num_processes" not in state and state.get("backend", backend) is None:
        state["backend"] = backend
