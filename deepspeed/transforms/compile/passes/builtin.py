"""Common part of the passes that come with the package.

[Note: settings, not rewriting] DeepSpeed's own passes write communication into a model's graph. Here parameters are
gathered and released around compiled blocks, and states move between steps, so the same passes name *settings* of that
machinery, which the engine makes when a schedule comes to them. As functions of a graph they leave it as it is; passes
of one's own (``register_compile_pass``) do rewrite it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed.transforms.compile.passes.contract import PassContract

GraphPass = Callable[..., Any]
"""``(gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd)`` -> the changed
``gm``, or None if there is nothing to change."""


@dataclass(frozen=True)
class PassSetting:
    """One pass of ours: its documented function, at which stages it says something, and its contract."""

    name: str
    function: GraphPass
    stages: frozenset[int]
    contract: PassContract
