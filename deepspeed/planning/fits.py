"""Refusing early: a run whose model states cannot fit ends with an error before ``initialize`` allocates anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger
from deepspeed.base.sharded import full_numel
from deepspeed.config.plan import Plan
from deepspeed.planning.machine import all_there_is, neighbours

if TYPE_CHECKING:
    from deepspeed.comm.mesh import ProcessMesh
    from deepspeed.config.deepspeed_config import DeepSpeedConfig

SKIP = "DS_SKIP_MEMORY_CHECK"
"""Environment variable that lets a run start without this check."""

MOST_BYTES_PER_PARAMETER = 64
"""More than any plan takes: below half of what is available, no plan is needed."""


class MemoryPlanError(ValueError):
    """Model states do not fit the device, the host or the disk; the message holds the plan and what to change."""


def check_fits(
    module: nn.Module,
    plan: Plan,
    config: DeepSpeedConfig,
    optimizer: Any,
    mesh: ProcessMesh,
    model_parameters: Sequence[Any] | None = None,
) -> None:
    """Raise MemoryPlanError if the model states cannot fit, whatever else the run does. Local; allocates nothing.

    Only what must exist is counted (weights, masters, gradients, optimizer state; no activations, buffers or
    temporaries), and it is compared to total capacity: whole devices, and all memory and swap space of the host. Only
    for disks is it the free space. Call it before the first collective of ``initialize``, so that no rank has taken
    disk space before the others have checked.

    Args:
        optimizer: the client's optimizer, or None for the one the config names. What a callable will return, or
            without either what is trained, is not known: then only weights count.
        model_parameters: what the config's optimizer will train; default: whatever requires a gradient.

    A plan that cannot be made stops no run, but is an error of this package: every rank reports it as one, with its
    traceback.
    """
    if os.environ.get(SKIP):
        return
    device_type = get_accelerator().device_name().partition(":")[0]
    near = neighbours()
    have = all_there_is(plan, device_type)
    numel = sum(full_numel(param) for param in module.parameters())
    if 2 * near * numel * MOST_BYTES_PER_PARAMETER <= min(
        n for n in (have.host, have.device, have.disk) if n
    ):
        return
    # The planner, for runs of which this bound is not enough.
    from deepspeed.planning.run_plan import shortage

    try:
        message = shortage(module, plan, config, optimizer, mesh, model_parameters, have, near, SKIP)
    except Exception:
        logger.exception(
            f"the memory of this run could not be planned, so it starts unchecked ({SKIP}=1 skips the check)"
        )
        return
    if message is not None:
        raise MemoryPlanError(message)
