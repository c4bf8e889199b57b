"""Memory check before ``initialize`` allocates anything: an error if model states cannot fit and, for the autotuner,
the memory need of every stage."""

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
"""Upper bound of any plan: if it stays below half of the available memory, no plan is made."""


class MemoryPlanError(ExplainedError, ValueError):
    """Model states do not fit the device, the host or the disk; the message holds the plan and the remedies."""


def check_fits(run: RunSpec) -> None:
    """Raise MemoryPlanError if the model states cannot fit, whatever else the run does. Local; allocates nothing.

    Counts model states only (weights, masters, gradients, optimizer state; no activations, buffers or temporaries) and
    compares them to the total capacity: full devices, all memory and swap space of the host, but for disks the free
    space. Call it before the first collective of ``initialize``, so that no rank takes disk space before the others
    have checked.

    Without an optimizer, or with a callable that builds it, the trained parameters are unknown: only weights count. A
    failure to plan does not stop a run, but is a bug of this package: every rank logs it with its traceback.
    """
    if os.environ.get(SKIP):
        return
    device_type = get_accelerator().device_name().partition(":")[0]
    near = neighbours()
    have = total_capacity(run.plan, device_type)
    numel = sum(full_numel(param) for param in run.module.parameters())
    known = [nbytes for nbytes in (have.host, have.device, have.disk) if nbytes is not None]
    if 2 * near * numel * MAX_BYTES_PER_PARAMETER <= min(known):
        return
    # Import the planner only for runs that exceed this bound.
    from deepspeed.planning.run_plan import shortage

    try:
        message = shortage(run, have, near, SKIP)
    except Exception:
        logger.exception(f"cannot plan the memory of this run; starting unchecked ({SKIP}=1 skips the check)")
        return
    if message is not None:
        raise MemoryPlanError(message)


def write_model_info_if_tuning(run: RunSpec) -> None:
    """Write the memory need of each ZeRO stage, on rank 0, if the autotuner asks for it."""
    tuning = run.config.autotuning_config
    asked = tuning.enabled and tuning.model_info_path and tuning.model_info and tuning.model_info.profile
    if asked and is_rank_zero():
        from deepspeed.planning.run_plan import write_model_info  # imports the planner

        write_model_info(run)
