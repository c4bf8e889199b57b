"""The run that ``initialize`` is about to build, as the planner is asked about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.config.plan import Plan

if TYPE_CHECKING:
    from deepspeed.comm.mesh import ProcessMesh
    from deepspeed.config.deepspeed_config import DeepSpeedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The arguments of ``initialize``, with what was decided from them. Nothing of the run is allocated yet."""

    module: nn.Module
    plan: Plan
    config: DeepSpeedConfig
    mesh: ProcessMesh
    optimizer: Any = None
    """The client's, or a callable that makes it; None: the one the config names."""
    model_parameters: Sequence[Any] | None = None
    """Parameters and group dicts that the config's optimizer trains; None: whatever requires a gradient."""
