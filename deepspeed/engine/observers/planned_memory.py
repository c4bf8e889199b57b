"""Planned memory of a run: now, at its peak, and the cheapest change that lowers the peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.base.sharded import is_zero_param
from deepspeed.planning.activations import shape_of
from deepspeed.planning.advice import cheapest_saving
from deepspeed.planning.ledger import TRAINING, Ledger, MemoryPhase, MemoryPlace
from deepspeed.planning.report import size
from deepspeed.planning.request import PlanRequest, answer

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


def request_of(engine: Engine) -> PlanRequest:
    """Return the planner request for this run, with its current batch sizes."""
    batch = {
        "train_batch_size": engine._config.train_batch_size,
        "train_micro_batch_size_per_gpu": engine._config.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": engine._config.gradient_accumulation_steps,
    }
    return PlanRequest(
        module=engine.module,
        config={**engine._config._param_dict, **batch},
        ranks=engine.seq_dp_world_size,
        ranks_per_sequence=engine.mesh.size("sp"),
        device_type=engine.device.type,
        optimizer=engine.basic_optimizer,
        zero_init=any(is_zero_param(param) for param in engine.module.parameters()),
        shape=shape_of(getattr(engine.module, "config", None)),
    )


def ledger_of(engine: Engine) -> Ledger:
    """Return the memory ledger of this rank. Raises any error of the planner."""
    return answer(request_of(engine)).ledger


def now_and_most(
    ledger: Ledger, places: tuple[MemoryPlace, ...] = (MemoryPlace.DEVICE, MemoryPlace.HOST)
) -> tuple[int, int]:
    """Return the planned bytes in ``places`` before training, and at the peak of training, without activations."""
    now = sum(ledger.total(MemoryPhase.READY, place, estimates=False) for place in places)
    most = max(sum(ledger.total(phase, place, estimates=False) for place in places) for phase in TRAINING)
    return now, most


def remedy(engine: Engine) -> str:
    """Return advice in a sentence or two. Computes a plan per candidate change; needs little memory."""
    planned = answer(request_of(engine))
    place = planned.setting.near
    need, phase = planned.ledger.peak(place)
    lines = [f"out of memory: this run plans {size(need)} per rank ({phase.value}), without activations."]
    found = cheapest_saving(planned, place)
    if found is not None:
        change, after = found
        lines.append(f"The cheapest change that lowers this: {change}, then {size(after)}.")
    micro_batch = planned.config.train_micro_batch_size_per_gpu
    smaller = f"train_micro_batch_size_per_gpu below {micro_batch}" if micro_batch > 1 else "shorter inputs"
    lines.append(
        f"Reduce activations with {smaller} or activation checkpointing. `ds plan` lists every part."
    )
    return " ".join(lines)
