"""Definitions shared by the built-in passes.

[Note: settings, not rewriting] The original DeepSpeed's passes insert communication into a model's graph. Here
parameters are gathered and released around compiled blocks, and states move between steps, so the built-in passes name
*settings* of that machinery, which the engine applies when a schedule reaches them. As graph functions they return the
graph unchanged; custom passes (``register_compile_pass``) do rewrite it.
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
class BuiltinPass:
    """A built-in pass: its documented function, the ZeRO stages it applies to, and its contract."""

    name: str
    function: GraphPass
    stages: frozenset[int]
    contract: PassContract
