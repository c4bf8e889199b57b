"""Refusing early: a run whose model states cannot fit ends with an error before ``initialize`` allocates anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger
from deepspeed.base.sharded import full_numel, is_zero_param
from deepspeed.config.plan import Plan
from deepspeed.planning import report
from deepspeed.planning.activations import shape_of
from deepspeed.planning.advice import advise
from deepspeed.planning.ledger import Place
from deepspeed.planning.machine import Capacity, all_there_is
from deepspeed.planning.request import Answer, Request, answer

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
    near = _neighbours()
    have = all_there_is(plan, device_type)
    numel = sum(full_numel(param) for param in module.parameters())
    if 2 * near * numel * MOST_BYTES_PER_PARAMETER <= min(
        n for n in (have.host, have.device, have.disk) if n
    ):
        return
    try:
        planned = answer(request_of(module, plan, config, optimizer, mesh, model_parameters, have))
        message = _message(planned) if _lacking(planned, near) else None
    except Exception:
        logger.exception(
            f"the memory of this run could not be planned, so it starts unchecked ({SKIP}=1 skips the check)"
        )
        return
    if message is not None:
        raise MemoryPlanError(message)


def request_of(
    module: nn.Module,
    plan: Plan,
    config: DeepSpeedConfig,
    optimizer: Any,
    mesh: ProcessMesh,
    model_parameters: Sequence[Any] | None,
    capacity: Capacity,
) -> Request:
    """What ``initialize`` is about to build, as a request to the planner."""
    ranks = mesh.size("dp", "sp")
    return Request(
        module=module,
        config=config._param_dict,
        ranks=ranks,
        ranks_per_sequence=mesh.size("sp"),
        nodes=max(1, ranks // _neighbours()),
        device_type=get_accelerator().device_name().partition(":")[0],
        optimizer=optimizer if isinstance(optimizer, torch.optim.Optimizer) else None,
        trained=model_parameters if optimizer is None and config.optimizer_name is not None else [],
        zero_init=any(is_zero_param(param) for param in module.parameters()),
        shape=shape_of(getattr(module, "config", None)),
        micro_batch=config.train_micro_batch_size_per_gpu,
        capacity=capacity,
        follow_disk=True,
    )


def _lacking(planned: Answer, near: int) -> bool:
    have = planned.capacity
    in_use = planned.request.zero_init and planned.plan.param_offload is not None
    for place in Place:
        limit = have.of(place)
        # A model built on storage has already taken its share.
        if limit is None or place is Place.DISK and in_use:
            continue
        if planned.ledger.states(place) * (1 if place is Place.DEVICE else near) > limit:
            return True
    return False


def _neighbours() -> int:
    """Ranks on this host, as far as a launcher tells; if too low, fewer runs are refused."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 1


def _message(planned: Answer) -> str:
    lines = ["the model states do not fit on this machine.", "", report.full_report(planned, None)]
    lines += report.advice_lines(advise(planned))
    lines.append(f"(`ds plan` shows the same for any number of ranks; {SKIP}=1 starts the run anyway)")
    return "\n".join(lines)
