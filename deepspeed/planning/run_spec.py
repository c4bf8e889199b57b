"""Description of the run that ``initialize`` is about to build, for the planner."""

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
    """The arguments of ``initialize``, and the plan and mesh derived from them. Nothing of the run is allocated yet."""

    module: nn.Module
    plan: Plan
    config: DeepSpeedConfig
    mesh: ProcessMesh
    optimizer: Any = None
    """The client's optimizer, or a callable that builds it; None: the config's."""
    model_parameters: Sequence[Any] | None = None
    """Parameters and group dicts that the config's optimizer trains; None: all that require a gradient."""
