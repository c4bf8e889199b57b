"""Checks of a run before ``initialize`` allocates anything: an error if its model states cannot fit, and for the
autotuner the memory of every stage."""

from __future__ import annotations

import os

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import is_rank_zero, logger
from deepspeed.base.sharded import full_numel
from deepspeed.planning.machine import neighbours, total_capacity
from deepspeed.planning.run_spec import RunSpec

SKIP = "DS_SKIP_MEMORY_CHECK"
"""Environment variable that lets a run start without this check."""

MAX_BYTES_PER_PARAMETER = 64
"""More than any plan takes: below half of what is available, no plan is needed."""


class MemoryPlanError(ExplainedError, ValueError):
    """Model states do not fit the device, the host or the disk; the message holds the plan and what to change."""


def check_fits(run: RunSpec) -> None:
    """Raise MemoryPlanError if the model states cannot fit, whatever else the run does. Local; allocates nothing.

    Only what must exist is counted (weights, masters, gradients, optimizer state; no activations, buffers or
    temporaries), and it is compared to total capacity: whole devices, and all memory and swap space of the host. Only
    for disks is it the free space. Call it before the first collective of ``initialize``, so that no rank has taken
    disk space before the others have checked.

    Without an optimizer, or with a callable that makes it, what is trained is not known: then only weights count. A
    plan that cannot be made stops no run, but is an error of this package: every rank logs it with its traceback.
    """
    if os.environ.get(SKIP):
        return
    device_type = get_accelerator().device_name().partition(":")[0]
    near = neighbours()
    have = total_capacity(run.plan, device_type)
    numel = sum(full_numel(param) for param in run.module.parameters())
    if 2 * near * numel * MAX_BYTES_PER_PARAMETER <= min(n for n in (have.host, have.device, have.disk) if n):
        return
    # The planner, for runs of which this bound is not enough.
    from deepspeed.planning.run_plan import shortage

    try:
        message = shortage(run, have, near, SKIP)
    except Exception:
        logger.exception(
            f"the memory of this run could not be planned, so it starts unchecked ({SKIP}=1 skips the check)"
        )
        return
    if message is not None:
        raise MemoryPlanError(message)


def write_model_info_if_tuning(run: RunSpec) -> None:
    """Write the memory that each ZeRO stage would need, on rank 0, if the autotuner asks for it."""
    tuning = run.config.autotuning_config
    asked = tuning.enabled and tuning.model_info_path and tuning.model_info and tuning.model_info.profile
    if asked and is_rank_zero():
        from deepspeed.planning.model_info import write_model_info  # the planner

        write_model_info(run)
