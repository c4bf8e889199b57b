"""Advice for a plan that does not fit: the cheapest known remedy, each verified by planning again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.section import is_auto
from deepspeed.planning.ledger import MemoryPhase, MemoryPlace
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer

SMALL_BUCKET = 50_000_000
"""Elements of the smallest bucket that still reaches full bandwidth."""

SMALL_MASTERS = (
    "optimizer.params.state_bits: 8, optimizer.params.stochastic_rounding: true and "
    "bf16.bf16_master_weights_and_grads: true"
)

MAX_RANKS = 4096

WORTH_IT = 0.05
"""Minimum share of the peak that a change must save to be suggested."""


@dataclass(frozen=True, slots=True)
class Change:
    """A remedy. ``text``: instruction for the user; ``apply``: returns the changed request, or None if it does not
    apply."""

    text: str
    apply: Callable[[PlanRequest], PlanRequest | None]


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that help together, and the resulting plan; ``result`` None: they are not enough."""

    changes: list[str]
    result: PlanAnswer | None
    ranks: int | None = None
    """World size that would be enough, if no change of the config is."""


def advise(current: PlanAnswer) -> Advice:
    """Find the first single change that makes the plan fit, else accumulate changes in order until it fits."""
    changes = list(_changes(current))
    alone: list[PlanAnswer | None] = []
    for change in changes:
        alone.append(_tried(change, current.request))
        if (found := alone[-1]) is not None and not found.lacking():
            return Advice([change.text], found)
    taken: list[Change] = []
    best = current
    for change, by_itself in zip(changes, alone, strict=True):
        found = _tried(change, best.request) if taken else by_itself
        if found is None or _missing(found) >= _missing(best):
            continue
        taken.append(change)
        best = found
        if not best.lacking():
            taken, best = _without_needless(taken, current, best)
            return Advice([change.text for change in taken], best)
    return Advice([change.text for change in taken], None, _enough_ranks(best))


def cheapest_saving(current: PlanAnswer, place: MemoryPlace) -> tuple[str, int] | None:
    """Return the first change that lowers the peak at ``place`` by ``WORTH_IT``, and the resulting peak in bytes; None
    if none does.

    For a run that ran out of memory although its plan fits: activations, fragmentation or other programs took the rest.
    """
    peak, _ = current.ledger.peak(place)
    for change in _changes(current):
        found = _tried(change, current.request)
        if found is not None and found.ledger.peak(place)[0] <= (1 - WORTH_IT) * peak:
            return change.text, found.ledger.peak(place)[0]
    return None


def _without_needless(
    taken: list[Change], current: PlanAnswer, best: PlanAnswer
) -> tuple[list[Change], PlanAnswer]:
    """Drop changes that the last, most expensive one has made unnecessary; return the rest and its plan."""
    for change in taken[:-1]:
        rest = [other for other in taken if other is not change]
        found: PlanAnswer | None = current
        for other in rest:
            found = _tried(other, found.request) if found is not None else None
        if found is not None and not found.lacking():
            taken, best = rest, found
    return taken, best


def _tried(change: Change, request: PlanRequest) -> PlanAnswer | None:
    changed = change.apply(request)
    if changed is None:
        return None
    try:
        return answer(changed)
    except (DeepSpeedConfigError, NotImplementedError):  # never advise an unsupported config
        return None


def _missing(found: PlanAnswer) -> int:
    """Return the bytes by which phases exceed the available memory, summed over phases, to rank changes that are not
    enough alone. Disk bytes count 1/1024."""
    total = 0
    for place in MemoryPlace:
        have = found.capacity.of(place)
        if have is not None:
            sharing = found.request.neighbours(place)
            over = sum(max(0, found.ledger.total(phase, place) * sharing - have) for phase in MemoryPhase)
            total += over // 1024 if place is MemoryPlace.DISK else over
    return total


def _changes(current: PlanAnswer) -> Iterator[Change]:
    """Yield the known changes, cheapest first: ZeRO stages (no time, then communication), host work, storage, changed
    numerics, smaller buckets and gathers, and last compute."""
    for stage in range(current.plan.zero.stage + 1, 4):
        yield Change(f"zero_optimization.stage: {stage}", partial(_zero, stage))
    yield Change("build the model under deepspeed.zero.Init", _zero_init)
    path = _nvme_path(current.request)
    where = path or "<a folder on local storage>"
    for key in ("offload_optimizer", "offload_param"):
        yield Change(f'zero_optimization.{key}: {{"device": "cpu"}}', partial(_offload, key, "cpu", None))
    for key in ("offload_optimizer", "offload_param"):
        text = f'zero_optimization.{key}: {{"device": "nvme", "nvme_path": "{where}"}}'
        yield Change(text, partial(_offload, key, "nvme", path))
    # These change numerics: they round moments, the second one weights, too. On the host they also cost time.
    yield Change("optimizer.params.state_bits: 8", partial(_small_states, False))
    yield Change(SMALL_MASTERS, partial(_small_states, True))
    yield Change(f"zero_optimization.reduce_bucket_size: {SMALL_BUCKET}", _smaller_buckets)
    yield Change(
        "zero_optimization.stage3_max_live_parameters: 0 and stage3_max_reuse_distance: 0", _fewer_gathered
    )
    micro = current.config.train_micro_batch_size_per_gpu
    while micro > 1:
        micro //= 2
        yield Change(f"train_micro_batch_size_per_gpu: {micro}", partial(_micro_batch, micro))
    yield Change("activation checkpointing (model.gradient_checkpointing_enable())", _checkpointing)


def _section(request: PlanRequest) -> dict[str, Any]:
    """Return the section without "auto" values, which the plan takes for the defaults."""
    section = request.config.get("zero_optimization", {})
    if not isinstance(section, dict):
        return {"stage": 1 if section else 0}
    return {key: copy.deepcopy(value) for key, value in section.items() if not is_auto(value)}


def _with_section(request: PlanRequest, section: dict[str, Any]) -> PlanRequest:
    return replace(request, config={**request.config, "zero_optimization": section})


def _zero_init(request: PlanRequest) -> PlanRequest | None:
    stage_3 = _section(request).get("stage") == 3
    return replace(request, zero_init=True) if stage_3 and not request.zero_init else None


def _zero(stage: int, request: PlanRequest) -> PlanRequest | None:
    section = _section(request)
    return _with_section(request, {**section, "stage": stage}) if section.get("stage", 0) < stage else None


def _offload(key: str, device: str, path: str | None, request: PlanRequest) -> PlanRequest | None:
    section = _section(request)
    present = section.get(key) or {}
    if section.get("stage", 0) < (3 if key == "offload_param" else 1):
        return None
    on_host = device == "cpu"
    if present.get("device", "none") in (device, "nvme") or (on_host and request.device_type == "cpu"):
        return None
    target = {**present, "device": device}
    if on_host:
        return _with_section(request, {**section, key: target})
    target["nvme_path"] = path or "."
    if key == "offload_param":
        target.setdefault("max_in_cpu", 0)
    changed = _with_section(request, {**section, key: target})
    return changed if path else replace(changed, follow_disk=False)  # which disk is unknown


def _small_states(masters: bool, request: PlanRequest) -> PlanRequest | None:
    """Change to 8-bit Adam moments; ``masters``: and to bf16 weights without fp32 masters."""
    section, precision = request.config.get("optimizer"), request.config.get("bf16")
    if request.optimizer is not None or not isinstance(section, dict):
        return None
    params = section.get("params") or {}
    named = str(section.get("type", "")).lower() in ("adam", "adamw", "fusedadam")
    chosen = params.get("torch_adam") or params.get("fp32_optimizer_states") is False
    bf16 = isinstance(precision, dict) and bool(precision.get("enabled"))
    if not named or chosen or (masters and not bf16):
        return None
    small = {"state_bits": 8, "stochastic_rounding": True} if masters else {"state_bits": 8}
    if small.items() <= params.items():
        return None
    changes: dict[str, Any] = {"optimizer": {**section, "params": {**params, **small}}}
    if masters:
        changes["bf16"] = {**precision, "bf16_master_weights_and_grads": True}  # type: ignore[dict-item]
    return replace(request, config={**request.config, **changes})


def hidden_updates(current: PlanAnswer) -> list[tuple[str, PlanAnswer]]:
    """Return the changes that let the host's update overlap with a device that now waits for it, each with its plan.
    They need more memory, which the machine may lack."""
    offload = current.plan.state_offload
    waits = current.setting.has_device_memory and offload is not None and offload.folder is None
    if not waits or current.plan.zenflow is not None or current.plan.speculates:
        return []
    super_offload = "zero_optimization.offload_optimizer.super_offload: true"
    changes = (
        Change(super_offload, partial(_with_key, "offload_optimizer", {"super_offload": True})),
        Change("zero_optimization.zenflow: {}", partial(_with_key, "zenflow", {})),
    )
    tried = [(change.text, _tried(change, current.request)) for change in changes]
    return [(text, planned) for text, planned in tried if planned is not None]


def _with_key(key: str, values: dict[str, Any], request: PlanRequest) -> PlanRequest:
    section = _section(request)
    return _with_section(request, {**section, key: {**(section.get(key) or {}), **values}})


def _nvme_path(request: PlanRequest) -> str | None:
    section = _section(request)
    for key in ("offload_optimizer", "offload_param"):
        path = (section.get(key) or {}).get("nvme_path")
        if path:
            return str(path)
    return None


def _smaller_buckets(request: PlanRequest) -> PlanRequest | None:
    section = _section(request)
    size = section.get("reduce_bucket_size", 500_000_000)
    if not isinstance(size, (int, float)) or size <= SMALL_BUCKET:
        return None
    return _with_section(request, {**section, "reduce_bucket_size": SMALL_BUCKET})


def _fewer_gathered(request: PlanRequest) -> PlanRequest | None:
    section = _section(request)
    if section.get("stage") != 3:
        return None
    return _with_section(
        request, {**section, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    )


def _micro_batch(size: int, request: PlanRequest) -> PlanRequest | None:
    if request.shape is None or request.sequence is None:
        return None
    return replace(request, micro_batch=size)


def _checkpointing(request: PlanRequest) -> PlanRequest | None:
    if request.checkpointing or request.shape is None or request.sequence is None:
        return None
    return replace(request, checkpointing=True)


def _enough_ranks(current: PlanAnswer) -> int | None:
    """Return the world size after the fewest doublings of nodes and ranks that make the plan fit; None above
    ``MAX_RANKS``."""
    request = current.request
    config = {key: value for key, value in request.config.items() if key != "train_batch_size"}
    micro = current.config.train_micro_batch_size_per_gpu
    while request.ranks * 2 <= MAX_RANKS:
        request = replace(
            request, ranks=request.ranks * 2, nodes=request.nodes * 2, config=config, micro_batch=micro
        )
        try:
            if not answer(request).lacking():
                return request.all_ranks
        except DeepSpeedConfigError:
            return None
    return None
