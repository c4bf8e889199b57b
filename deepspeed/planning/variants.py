"""Planned config variants for the autotuner: memory need, bytes sent and elements updated by each."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from deepspeed.base.accelerator.host_memory import resident_bytes
from deepspeed.base.sharded import full_numel
from deepspeed.config.axes import SEQUENCE, TENSOR
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning.link_time import link_times
from deepspeed.planning.request import BATCH, PlanAnswer, PlanRequest, answer
from deepspeed.zero.partitioning import blocks_of

STAGES, EXPERTS = "pipeline.stages", "expert_parallel.autoep_size"


def note_variants(request: PlanRequest, variants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, before the model is changed: the planned `variants` in order, its number of blocks, and this process's
    resident bytes without the model."""
    weights = sum(p.numel() * p.element_size() for p in request.module.parameters() if p.device.type == "cpu")
    return {
        "variants": [{"changes": dict(changes), **planned_variant(request, changes)} for changes in variants],
        "blocks": len(blocks_of(request.module)),
        "resident": max(0, resident_bytes() - weights),
    }


def planned_variant(request: PlanRequest, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's peak bytes where the model computes, whether every place has enough memory, bytes sent per step,
    and elements updated; or the error of an impossible config.

    `changes`: dotted key -> value. Environment variables and batch sizes are ignored. Under tensor and pipeline
    parallelism, a rank holds an equal share of what can be divided.
    """
    config = changed(request.config, {key: value for key, value in changes.items() if key not in BATCH})
    parts = int(changes.get(TENSOR, 1)) * int(changes.get(STAGES, 1))
    if request.ranks % parts:
        return {"error": f"{parts} model-parallel parts do not divide {request.ranks} ranks"}
    config.get("tensor_parallel", {}).pop("autotp_size", None)
    config.pop("train_batch_size", None)
    config["gradient_accumulation_steps"] = 1
    try:
        found = answer(
            replace(
                request,
                config=config,
                ranks=request.ranks // parts,
                ranks_per_sequence=int(changes.get(SEQUENCE, request.ranks_per_sequence)),
            )
        )
    except (DeepSpeedConfigError, ValueError, NotImplementedError) as error:
        return {"error": str(error).splitlines()[0]}
    near, left = found.setting.near, _left(request.module, changes)
    sharded = found.plan.zero.shard_state
    trained = sum(spec.numel for spec in found.setting.model.specs[: found.setting.model.trained])
    return {
        "need": int(found.ledger.peak(near)[0] * left),
        "fits": not found.lacking(),
        "sent": _sent(found) * left,
        "owned": trained * left / (found.setting.shards if sharded else 1),
    }


def refuse_beyond(limit: int | None, planned: Mapping[str, Any], sharing: int) -> None:
    """Raise ValueError if the current run needs more than ``limit`` bytes per rank. ``sharing``: ranks per node."""
    if limit is None or "need" not in planned:
        return
    near = planned["near"]
    need = planned["need"][near] // (sharing if near == "host" else 1)
    if need > limit:
        raise ValueError(
            f"autotuning.memory_per_rank is {limit}, but the model states of this config need {need} bytes "
            "per rank: not run"
        )


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the config with these dotted keys changed; names in capitals are environment variables and
    skipped."""
    result = copy.deepcopy(dict(config))
    for key, value in changes.items():
        if key.isupper():
            continue
        put(result, key, value)
    return result


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in place; sections on its path are copied or created."""
    *parents, last = key.split(".")
    for parent in parents:
        below = config.get(parent)
        config[parent] = dict(below) if isinstance(below, Mapping) else {}
        config = config[parent]
    config[last] = value


def _left(module: nn.Module, changes: Mapping[str, Any]) -> float:
    """Return the share of the model on a rank: linear layers inside blocks are divided over tensor-parallel ranks,
    blocks over pipeline stages."""
    total = sum(full_numel(p) for p in module.parameters()) or 1
    inside = [p for block in blocks_of(module) for p in block.parameters()]
    blocks = sum(full_numel(p) for p in inside) / total
    linear = sum(full_numel(p) for p in inside if p.dim() > 1) / total
    tensor, stages = int(changes.get(TENSOR, 1)), int(changes.get(STAGES, 1))
    return (1 - linear * (1 - 1 / tensor)) * (1 - blocks * (1 - 1 / stages))


def _sent(found: PlanAnswer) -> float:
    ranks = found.request.ranks
    if ranks == 1:
        return 0.0
    one_rank_per_node = replace(found, request=replace(found.request, nodes=ranks))
    return link_times(one_rank_per_node, 1.0, 1.0).options[0].nbytes
