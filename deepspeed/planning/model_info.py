"""Memory need of a run at each ZeRO stage, for the autotuner: planned in the process that has the model, before
training."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.sharded import full_numel
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.machine import free_now
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.planning.run_plan import request_of
from deepspeed.planning.run_spec import RunSpec
from deepspeed.planning.variants import note_variants, refuse_beyond

STAGES = (0, 1, 2, 3)


def write_model_info(run: RunSpec) -> None:
    """Write the model's facts to ``autotuning.model_info_path``: its parameters and, by stage, the peak bytes that the
    ranks of a node need together, without activations, and the free bytes."""
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
        "stages": {str(stage): planned(request, stage) for stage in STAGES},
        **note_variants(request, tuning.variants),
    }
    path = Path(tuning.model_info_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(info, indent=2), encoding="utf-8")
    refuse_beyond(tuning.memory_per_rank, info["stages"][str(run.plan.zero.stage)], request.ranks_per_node)


def planned(request: PlanRequest, stage: int) -> dict[str, Any]:
    """Return the needed and the free bytes per place at this stage, or the error of an impossible config."""
    config = copy.deepcopy(dict(request.config))
    zero = config.get("zero_optimization")
    config["zero_optimization"] = {**(zero if isinstance(zero, dict) else {}), "stage": stage}
    try:
        found = answer(replace(request, config=config))
    except (DeepSpeedConfigError, ValueError, NotImplementedError) as error:
        return {"error": str(error)}
    near = found.setting.near
    return {
        "near": near.name.lower(),
        "need": {place.name.lower(): found.need(place)[0] for place in MemoryPlace},
        "free": {place.name.lower(): found.capacity.of(place) for place in MemoryPlace},
        "fits": not found.lacking(),
    }
