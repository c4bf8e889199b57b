"""Expert load: tokens per expert, for the monitors and the wall-clock breakdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deepspeed.base.logging import is_rank_zero, log_dist
from deepspeed.observe.monitor.monitor import MonitorMaster
from deepspeed.parallel.expert.metrics import RoutingStats
from deepspeed.parallel.expert.placement import numbers_in_model, routing_layers

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

PREFIX = "Train/Experts/"


def watch_experts(engine: Engine, monitor: MonitorMaster | None) -> None:
    """Attach ``ExpertLoads`` if the module, or another pipeline stage, has mixture-of-experts layers."""
    layers = dict(routing_layers(engine.module))
    numbers = numbers_in_model(list(layers), engine.mesh)
    if any(_of_all_stages(engine, bool(layers))):
        numbered = dict(zip(numbers, layers.values(), strict=True))
        ExpertLoads(engine, numbered, monitor, timed=bool(engine._config.wall_clock_breakdown))


class ExpertLoads:
    """Writes after every step, per layer, over all ranks and micro-batches of the step:

        layer_0/dropped_share      fraction of choices dropped because the expert was full
        layer_0/imbalance          tokens of the busiest expert / mean: 1 is balanced
        layer_0/expert_3           fraction of choices routed to expert 3
        exchange_ms                rank 0's time in dispatch and combine, over all its layers

    ``layers``: layers of this pipeline stage, by number in the whole model. ``monitor``: None: only log the exchange
    time, for ``wall_clock_breakdown``. Made on every rank: the sums are collective.
    """

    def __init__(
        self, engine: Engine, layers: Mapping[int, Any], monitor: MonitorMaster | None, *, timed: bool
    ) -> None:
        self.engine, self.monitor, self.timed = engine, monitor, timed
        self.watches = {number: RoutingStats() for number in layers}
        for number, layer in layers.items():
            layer.watch = self.watches[number]
        engine.events.on("after_update", self.write)

    def write(self, **_: Any) -> None:
        milliseconds = 1e3 * sum(watch.seconds for watch in self.watches.values())
        if self.timed:
            log_dist(f"time (ms) | expert exchange: {milliseconds:.2f}", ranks=[0])
        if self.monitor is not None:
            values = {"exchange_ms": milliseconds}
            for loads in _of_all_stages(self.engine, self._loads()):
                values |= loads
            if is_rank_zero():
                self.monitor.write_events(self.engine.curve_axis.events(values, PREFIX))
        for watch in self.watches.values():
            watch.reset()

    def _loads(self) -> dict[str, float]:
        """Return the loads of this stage. Collective, one sum for all layers."""
        used = [
            (n, w.chosen, w.kept)
            for n, w in self.watches.items()
            if w.chosen is not None and w.kept is not None
        ]
        if not used:
            return {}
        sums = torch.cat([torch.cat([chosen, kept.view(1)]) for _, chosen, kept in used]).double()
        self.engine.replica_groups.all_ranks.all_reduce(sums).wait()
        values: dict[str, float] = {}
        parts = sums.cpu().split([len(chosen) + 1 for _, chosen, _ in used])
        for (number, _, _), part in zip(used, parts, strict=True):
            chosen, kept = part[:-1], float(part[-1])
            total = max(float(chosen.sum()), 1.0)
            values[f"layer_{number}/dropped_share"] = max(1.0 - kept / total, 0.0)
            values[f"layer_{number}/imbalance"] = float(chosen.max()) / (total / len(chosen))
            values |= {f"layer_{number}/expert_{e}": float(each) / total for e, each in enumerate(chosen)}
        return values


def _of_all_stages(engine: Engine, value: Any) -> list[Any]:
    """Return ``value`` of every pipeline stage. Collective over the stages."""
    found = [value] * engine.mesh.size("pp")
    if len(found) > 1:
        dist.all_gather_object(found, value, group=engine.mesh.group("pp"))
    return found
