"""Notes for the autotuner about the model, made where the model is, before it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.base.logging import is_rank_zero
from deepspeed.config.plan import Plan

if TYPE_CHECKING:
    from deepspeed.comm.mesh import ProcessMesh
    from deepspeed.config.deepspeed_config import DeepSpeedConfig


def note_stages(
    module: nn.Module,
    plan: Plan,
    config: DeepSpeedConfig,
    optimizer: Any,
    mesh: ProcessMesh,
    model_parameters: Sequence[Any] | None,
) -> None:
    """Write the memory that each ZeRO stage would need, on rank 0, if the autotuner asks for it."""
    tuning = config.autotuning_config
    asked = tuning.enabled and tuning.model_info_path and tuning.model_info and tuning.model_info.profile
    if asked and is_rank_zero():
        from deepspeed.planning.model_info import write_model_info  # the planner

        write_model_info(module, plan, config, optimizer, mesh, model_parameters)
