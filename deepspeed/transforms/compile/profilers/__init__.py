"""Facts about the graphs of a compiled function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ProfilingResult:
    """The graphs of one compiled function, as they are after all passes."""

    fwd_graph: Any = None
    bwd_graph: Any = None
    needs_backward: bool = False
