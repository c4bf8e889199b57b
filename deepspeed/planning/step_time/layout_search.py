"""Search over parallel layouts (ZeRO stage, TP, PP, SP, EP, offload) for a number of ranks: memory and step time of
each.

All layouts train the same batch. Closed formulas rank all of them; the best, and plain ZeRO at each stage, are then
planned and simulated.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from deepspeed.base.tables import padded
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning.activations import TransformerShape, activation_bytes
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.model_split import ModelSplit
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer
from deepspeed.planning.step_time.parallel import ParallelJob, ParallelLayout, seconds_of
from deepspeed.planning.step_time.step import StepTime

MAX_TENSOR, MAX_SEQUENCE = 8, 16
LONG = 16384
"""Tokens per sample from which sequence parallelism is considered."""
PLANNED = 10
"""Number of top-ranked layouts that are planned and simulated."""


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A planned and simulated layout. ``need``: peak bytes per rank where the model computes."""

    layout: ParallelLayout
    need: int
    fits: bool
    time: StepTime
    samples: int

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.time.seconds if self.time.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRanking:
    """Result of a search. ``rows``: layouts that fit, the fastest first, then the others. ``others``: number of layouts
    that were only ranked. ``samples``: per step; ``tokens``: per sample."""

    rows: Sequence[PlannedLayout]
    others: int
    samples: int
    tokens: int

    @property
    def best(self) -> PlannedLayout | None:
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def lines(self) -> list[str]:
        head = ("", "fits", "GiB/rank", "s/step", "tokens/s", "waits", "waits for")
        title = f"a step of {self.samples} sample{'s' * (self.samples != 1)}" + (
            f" ({self.samples * self.tokens:,} tokens)" if self.tokens else ""
        )
        lines = [f"{title}, fastest fitting first (predicted):"]
        cells = padded([head, *(self._cells(row) for row in self.rows)], left=(0, 6))
        lines += ["  ".join(["", *row]).rstrip() for row in cells]
        if self.others:
            lines.append(f"  ({self.others} more layouts, ranked by formulas, are omitted)")
        best = self.best
        lines.append(f"fastest that fits: {best.layout}" if best is not None else "no tried layout fits")
        return lines

    def _cells(self, row: PlannedLayout) -> tuple[str, ...]:
        waits = row.time.exposed / row.time.seconds if row.time.seconds else 0.0
        return (
            str(row.layout),
            "yes" if row.fits else "NO",
            f"{row.need / 2**30:.2f}",
            f"{row.time.seconds:.3f}",
            f"{row.rate * self.tokens:,.0f}" if self.tokens else "-",
            f"{waits:.0%}",
            row.time.reason,
        )

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "way": str(row.layout),
                **asdict(row.layout),
                "bytes_per_rank": row.need,
                "fits": row.fits,
                "seconds": row.time.seconds,
                "compute": row.time.compute,
                "samples_per_second": row.rate,
            }
            for row in self.rows
        ]


@dataclass(slots=True, kw_only=True)
class LayoutSearch:
    """The search. ``request``: the config unchanged, for all ranks and the whole model. ``modules``: by expert-parallel
    degree, the model with its experts spread. ``job``: the hardware."""

    request: PlanRequest
    job: ParallelJob
    samples: int
    """Samples per step, over all ranks."""
    modules: Mapping[int, nn.Module] = field(default_factory=dict)
    numel: dict[int, int] = field(default_factory=dict)
    """Cache of parameter counts by expert-parallel degree."""

    def run(self) -> LayoutRanking:
        layouts = list(self.layouts())
        rough = {layout: self._estimate(layout) for layout in layouts}
        layouts.sort(key=lambda layout: (rough[layout], str(layout)))
        chosen = list(layouts[:PLANNED])
        chosen += [layout for layout in layouts[PLANNED:] if layout == ParallelLayout(stage=layout.stage)]
        rows = [row for layout in chosen if (row := self._planned(layout)) is not None]
        rows.sort(key=lambda row: (not row.fits, row.time.seconds if row.fits else row.need))
        return LayoutRanking(
            rows=rows,
            others=len(layouts) - len(chosen),
            samples=self.samples,
            tokens=self.request.sequence or 0,
        )

    # Enumeration of layouts ---------------------------------------------------------------------------------

    def layouts(self) -> Iterator[ParallelLayout]:
        request, shape = self.request, self.request.shape
        ranks, node = request.ranks, request.ranks_per_node
        tensor = [n for n in _powers(min(MAX_TENSOR, node)) if shape is not None and _divides(n, shape)] or [
            1
        ]
        stages = [n for n in _powers(ranks) if shape is not None and n <= max(1, shape.layers // 2)] or [1]
        long = (request.sequence or 0) >= LONG
        sequence = (
            [n for n in _powers(MAX_SEQUENCE) if shape is not None and shape.heads % n == 0] if long else [1]
        )
        has_device_memory = request.device_type != "cpu"
        recompute = [request.checkpointing]
        if shape is not None and request.sequence and not request.checkpointing:
            recompute.append(True)
        values = {
            "stage": range(4),
            "tensor": tensor,
            "stages": stages,
            "sequence": sequence,
            "experts": self.modules or [1],
            "offload": (0, 1, 2) if has_device_memory else (0,),
            "checkpointing": recompute,
        }
        for chosen in itertools.product(*values.values()):
            layout = ParallelLayout(**dict(zip(values, chosen, strict=True)))
            if self._possible(layout, ranks):
                yield layout

    def _possible(self, layout: ParallelLayout, ranks: int) -> bool:
        if ranks % layout.model_ranks or self.samples % (ranks // layout.model_ranks * self.micro):
            return False
        data = ranks // (layout.tensor * layout.stages)
        if data == 1 and layout.stage > 0 and not layout.offload:  # nothing to shard over: same as stage 0
            return False
        if layout.experts > 1 and (data % layout.experts or layout.stages > 1):
            return False
        if layout.stages > 1 and (
            layout.stage > 1 or layout.sequence > 1 or self.micro_batches(layout) < layout.stages
        ):
            return False
        if layout.offload and (layout.stage == 0 or layout.stages > 1):
            return False
        return layout.offload < 2 or layout.stage == 3

    @property
    def micro(self) -> int:
        return self.request.micro_batch or 1

    def micro_batches(self, layout: ParallelLayout) -> int:
        return self.samples // (self.request.ranks // layout.model_ranks * self.micro)

    # Ranking by closed formulas -----------------------------------------------------------------------------

    def _estimate(self, layout: ParallelLayout) -> tuple[bool, float]:
        """Estimate whether the layout exceeds device memory, and its step time in seconds."""
        numel = self._numel(layout.experts) / (layout.tensor * layout.stages)
        data = self.request.ranks // (layout.tensor * layout.stages)
        weights, gradients, states = 2.0 * numel, 2.0 * numel, 12.0 * numel
        near = (weights / data if layout.stage == 3 else weights) + (
            gradients / data if layout.stage >= 2 else gradients
        )
        near += 0.0 if layout.offload else states / data if layout.stage else states
        have = self.request.capacity.device
        need = near + self._activations(layout)
        seconds = self.job.estimated_seconds(layout, numel, data, self.micro_batches(layout))
        if layout.offload and self.job.device is not None:
            seconds += states / 12 / max(1, data) * self.job.device.host_update
        return have is not None and need > have, seconds

    def _activations(self, layout: ParallelLayout) -> float:
        shape, sequence = self.request.shape, self.request.sequence
        if shape is None or sequence is None:
            return 0.0
        split = ModelSplit(
            tensor=layout.tensor, stages=layout.stages, held=min(layout.stages, self.micro_batches(layout))
        )
        return activation_bytes(
            split.local_shape(shape),
            micro_batch=self.micro,
            sequence=-(-sequence // layout.sequence),
            ranks_per_sequence=layout.sequence,
            itemsize=2,
            checkpointing=layout.checkpointing,
        )

    def _numel(self, experts: int) -> int:
        if experts not in self.numel:
            module = self.modules.get(experts, self.request.module)
            self.numel[experts] = sum(param.numel() for param in module.parameters())
        return self.numel[experts]

    # Planning and simulation --------------------------------------------------------------------------------

    def _planned(self, layout: ParallelLayout) -> PlannedLayout | None:
        try:
            found = [answer(self._request(layout, stage)) for stage in sorted({0, layout.stages - 1})]
        except (DeepSpeedConfigError, NotImplementedError, ValueError):
            return None
        near = MemoryPlace.DEVICE if self.request.device_type != "cpu" else MemoryPlace.HOST
        worst = max(found, key=lambda each: (bool(each.lacking()), each.ledger.peak(near)[0]))
        return PlannedLayout(
            layout,
            worst.ledger.peak(near)[0],
            not any(each.lacking() for each in found),
            seconds_of(found, self.job, layout),
            self.samples,
        )

    def _request(self, layout: ParallelLayout, stage: int) -> PlanRequest:
        request = self.request
        held = min(layout.stages - stage, self.micro_batches(layout))
        data = request.ranks // (layout.tensor * layout.stages)
        return replace(
            request,
            module=self.modules.get(layout.experts, self.request.module),
            config=self._config(layout),
            ranks=data,
            ranks_per_sequence=layout.sequence,
            checkpointing=layout.checkpointing,
            zero_init=layout.stage == 3,
            micro_batch=self.micro,
            split=ModelSplit(tensor=layout.tensor, stages=layout.stages, stage=stage, held=held),
        )

    def _config(self, layout: ParallelLayout) -> dict[str, Any]:
        config = copy.deepcopy(dict(self.request.config))
        for key in (
            "tensor_parallel",
            "pipeline",
            "expert_parallel",
            "train_batch_size",
            "data_parallel_size",
        ):
            config.pop(key, None)
        zero = config.get("zero_optimization")
        zero = dict(zero) if isinstance(zero, dict) else {}
        for key in ("offload_optimizer", "offload_param"):
            zero.pop(key, None)
        if layout.stage < 3:
            zero = {key: value for key, value in zero.items() if not key.startswith(("zero_", "mics_"))}
        zero["stage"] = layout.stage
        if layout.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if layout.offload == 2:
            zero["offload_param"] = {"device": "cpu"}
        config |= {"zero_optimization": zero, "gradient_accumulation_steps": self.micro_batches(layout)}
        config["train_micro_batch_size_per_gpu"] = self.micro
        if layout.sequence > 1:
            config["sequence_parallel_size"] = layout.sequence
        else:
            config.pop("sequence_parallel_size", None)
        return config


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _divides(size: int, shape: TransformerShape) -> bool:
    return shape.heads % size == 0 and shape.kv_heads % size == 0


def samples_of(found: PlanAnswer) -> int:
    """Return the samples per step of the unchanged config, over all ranks."""
    config, request = found.config, found.request
    data = request.ranks // request.ranks_per_sequence
    return config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * data
