"""Profiling results of a compiled function's graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ProfilingResult:
    """The graphs of one compiled function, after all passes."""

    fwd_graph: Any = None
    bwd_graph: Any = None
    needs_backward: bool = False
