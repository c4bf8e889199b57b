"""The plan of a run that is about to start: its request, and the message if its model states do not fit."""

from __future__ import annotations

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.sharded import is_zero_param
from deepspeed.planning import report
from deepspeed.planning.activations import shape_of
from deepspeed.planning.advice import advise
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.machine import Capacity, neighbours
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer
from deepspeed.planning.run_spec import RunSpec


def shortage(run: RunSpec, capacity: Capacity, near: int, skip: str) -> str | None:
    """Return a message on the model states that exceed ``capacity`` with ``near`` ranks on this host, and on what to
    change; None if they fit. ``skip``: environment variable that starts the run anyway."""
    planned = answer(request_of(run, capacity))
    return _message(planned, skip) if _lacking(planned, near) else None


def request_of(run: RunSpec, capacity: Capacity) -> PlanRequest:
    """Return the request to the planner that describes ``run`` on a machine of this capacity."""
    optimizer, config, mesh = run.optimizer, run.config, run.mesh
    ranks = mesh.size("dp", "sp")
    return PlanRequest(
        module=run.module,
        config=config._param_dict,
        ranks=ranks,
        ranks_per_sequence=mesh.size("sp"),
        nodes=max(1, ranks // neighbours()),
        device_type=get_accelerator().device_name().partition(":")[0],
        optimizer=optimizer if isinstance(optimizer, torch.optim.Optimizer) else None,
        trained=run.model_parameters if optimizer is None and config.optimizer_name is not None else [],
        zero_init=any(is_zero_param(param) for param in run.module.parameters()),
        shape=shape_of(getattr(run.module, "config", None)),
        micro_batch=config.train_micro_batch_size_per_gpu,
        capacity=capacity,
        follow_disk=True,
    )


def _lacking(planned: PlanAnswer, near: int) -> bool:
    have = planned.capacity
    in_use = planned.request.zero_init and planned.plan.param_offload is not None
    for place in MemoryPlace:
        limit = have.of(place)
        # A model built on storage already occupies its share of the disk.
        if limit is None or place is MemoryPlace.DISK and in_use:
            continue
        if planned.ledger.states(place) * (1 if place is MemoryPlace.DEVICE else near) > limit:
            return True
    return False


def _message(planned: PlanAnswer, skip: str) -> str:
    lines = ["the model states do not fit on this machine.", "", report.full_report(planned, None)]
    lines += report.advice_lines(advise(planned))
    lines.append(f"(`ds plan` shows the same for any number of ranks; {skip}=1 starts the run anyway)")
    return "\n".join(lines)
