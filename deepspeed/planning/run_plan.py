"""The plan of a run that is about to start: its request, the message if its model states do not fit, and the memory
need at each stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.sharded import full_numel, is_zero_param
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning import report
from deepspeed.planning.activations import shape_of
from deepspeed.planning.advice import advise
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.machine import Capacity, free_now, neighbours
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer
from deepspeed.planning.run_spec import RunSpec
from deepspeed.planning.variants import changed, note_variants, refuse_beyond


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


# The memory need at each ZeRO stage, for the autotuner: planned in the process that has the model, before training.


def write_model_info(run: RunSpec) -> None:
    """Write a description of the model to ``autotuning.model_info_path``: its parameters and, by stage, the peak bytes
    that the ranks of a node need together, without activations, and the free bytes."""
    tuning = run.config.autotuning_config
    assert tuning.model_info_path
    here = free_now(run.plan, get_accelerator().device_name().partition(":")[0])
    request = request_of(run, here)
    params = list(run.module.parameters())
    info = {
        "num_params": sum(map(full_numel, params)),
        "trainable_num_params": sum(full_numel(param) for param in params if param.requires_grad),
        "ranks_per_node": request.ranks_per_node,
        "device_type": request.device_type,
        "stages": {str(stage): stage_need(request, stage) for stage in range(4)},
        **note_variants(request, tuning.variants),
    }
    path = Path(tuning.model_info_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(info, indent=2), encoding="utf-8")
    refuse_beyond(tuning.memory_per_rank, info["stages"][str(run.plan.zero.stage)], request.ranks_per_node)


def stage_need(request: PlanRequest, stage: int) -> dict[str, Any]:
    """Return the needed and the free bytes per place at this stage, or the error of an impossible config."""
    config = changed(request.config, {"zero_optimization.stage": stage})
    try:
        found = answer(replace(request, config=config))
    except (DeepSpeedConfigError, ValueError, NotImplementedError) as error:
        return {"error": str(error)}
    return {
        "near": found.setting.near.value,
        "need": {place.value: found.need(place)[0] for place in MemoryPlace},
        "free": {place.value: found.capacity.of(place) for place in MemoryPlace},
        "fits": not found.lacking(),
    }
