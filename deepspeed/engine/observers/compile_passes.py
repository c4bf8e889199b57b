"""Schedule of compile passes (``compile.deepcompile``): which passes are active from which step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.base.logging import log_dist
from deepspeed.comm.collectives import Communicator
from deepspeed.config.sections.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.transforms.compile.backend import GraphPassRunner
from deepspeed.transforms.compile.passes import offload_adam_states, prefetch, selective_gather
from deepspeed.transforms.compile.schedule import Period
from deepspeed.zero.gathering.sharded_model import ShardedModel
from deepspeed.zero.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from deepspeed.base.accelerator.abstract_accelerator import DeepSpeedAccelerator
    from deepspeed.engine.interface import Engine

_MARGIN = 0.1
"""Fraction of free memory to leave free when parameters are kept gathered."""

_MOVING = {offload_adam_states.NAME, offload_adam_states.NAME_SYNC, offload_adam_states.NAME_INIT}
_STATES = (OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params)


class PassSchedule:
    """Applies the settings of each period at its step, on all ranks between two steps."""

    def __init__(self, engine: Engine, periods: Sequence[Period], work: GraphPassRunner) -> None:
        self.engine = engine
        self.periods = list(periods)
        self.work = work
        self.current: Period | None = None
        self._offloads = False
        self.follow()
        engine.events.on("at_boundary", self.reload_states)
        engine.events.on("after_step", self.after_step)
        engine.events.on("on_load", self.follow)
        engine.events.on("on_destroy", self.reload_states)

    def follow(self, **_: Any) -> None:
        """Begin the period of the engine's current step, if it has not begun."""
        due = [period for period in self.periods if period.step <= self.engine.global_steps]
        if due and due[-1] is not self.current:
            self._begin(due[-1])

    def after_step(self, **_: Any) -> None:
        self.follow()
        self._offload_states()

    def _begin(self, period: Period) -> None:
        if self.current is not None:
            log_dist(f"compile: step {period.step}: {self.described(period)}", ranks=[0])
            if period.passes != self.current.passes:
                torch.compiler.reset()
                self.work.restart(period.passes)
        else:
            self.work.restart(period.passes)
        self.current = period
        sharded = self.engine.sharded
        if sharded is not None:
            ahead = self.engine._config.zero_config.prefetch_bucket_size
            sharded.set_prefetch(int(ahead) if prefetch.NAME in period.settings else 0)
            if self.engine.plan.param_offload is None:  # else shards stay on the host
                keep = selective_gather.NAME in period.settings
                sharded.keep_gathered(self._room(sharded) if keep else 0)
        self._offloads = bool(_MOVING & period.settings)
        if offload_adam_states.NAME_INIT in period.settings:
            self._offload_states()

    @staticmethod
    def described(period: Period) -> str:
        functions = [getattr(function, "__name__", str(function)) for function in period.passes]
        return ", ".join([*sorted(period.settings), *functions]) or "no passes"

    def _room(self, sharded: ShardedModel) -> int:
        """Return the bytes available for parameters that stay gathered: the minimum over ranks of free memory, minus
        a margin. Collective."""
        accelerator: DeepSpeedAccelerator = self.engine.accelerator
        all_ranks = sharded.replica_groups.all_ranks
        # Host memory is shared by all ranks.
        shared_by = all_ranks.size if accelerator.device_name() == "cpu" else 1
        free = int(accelerator.available_memory() * (1 - _MARGIN)) // shared_by
        return _least(all_ranks, free, self.engine.device)

    # The optimizer's states ---------------------------------------------------------------------------------

    def _offload_states(self) -> None:
        optimizer = self.engine.optimizer
        if self._offloads and self.engine.clock.position == 0 and isinstance(optimizer, ZeroOptimizer):
            assert self.current is not None
            wait = offload_adam_states.NAME_SYNC in self.current.settings
            optimizer.offload_states(_STATES, OffloadDeviceEnum.cpu, True, not wait)

    def reload_states(self, **_: Any) -> None:
        optimizer = self.engine.optimizer
        if self._offloads and isinstance(optimizer, ZeroOptimizer):
            optimizer.reload_states()


def _least(all_ranks: Communicator, value: int, device: torch.device) -> int:
    negative = torch.tensor([-value], dtype=torch.int64, device=device)
    all_ranks.all_reduce_max(negative).wait()
    return -int(negative.item())
