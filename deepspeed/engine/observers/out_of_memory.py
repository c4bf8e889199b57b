"""After an out-of-memory error: what the plan says about the run, and the cheapest change that lowers its peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspeed.base.logging import logger
from deepspeed.base.sharded import is_zero_param
from deepspeed.planning.activations import shape_of
from deepspeed.planning.advice import cheapest_saving
from deepspeed.planning.report import size
from deepspeed.planning.request import Request, answer

if TYPE_CHECKING:
    from deepspeed.engine.base import EngineBase

SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
"""What the messages of allocators contain that raise a plain RuntimeError: torch's for the host, and drivers'."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def request_of(engine: EngineBase) -> Request:
    """The planner request that corresponds to this run, with its batch sizes as they are by now."""
    batch = {
        "train_batch_size": engine.train_batch_size(),
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
    }
    return Request(
        module=engine.module,
        config={**engine._config._param_dict, **batch},
        ranks=engine.seq_dp_world_size,
        ranks_per_sequence=engine.mesh.size("sp"),
        device_type=engine.device.type,
        optimizer=engine.basic_optimizer,
        zero_init=any(is_zero_param(param) for param in engine.module.parameters()),
        shape=shape_of(getattr(engine.module, "config", None)),
    )


def remedy(engine: EngineBase) -> str:
    """What to change, in a sentence or two. Computes a plan for each change tried; uses hardly any memory."""
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
        f"Activations shrink with {smaller} or activation checkpointing. `ds plan` lists every part."
    )
    return " ".join(lines)


class OutOfMemoryAdvice:
    """Logs the remedy on the rank that ran out of memory, once per engine."""

    def __init__(self, engine: EngineBase) -> None:
        self.engine = engine
        self.given = False
        engine.events.on("on_error", self.look)

    def look(self, *, error: BaseException | None) -> None:
        if self.given or not is_out_of_memory(error):
            return
        self.given = True
        try:
            logger.error(remedy(self.engine))
        except Exception as problem:  # advice must not hide the error
            logger.debug(f"no remedy could be planned: {problem}")
