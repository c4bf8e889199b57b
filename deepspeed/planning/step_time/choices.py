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

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning.activations import TransformerShape, activation_bytes
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer
from deepspeed.planning.split import Split
from deepspeed.planning.step_time.parallel import ParallelJob, seconds_of
from deepspeed.planning.step_time.step import StepTime

MAX_TENSOR, MAX_SEQUENCE = 8, 16
LONG = 16384
"""Tokens per sample from which sequence parallelism is considered."""
PLANNED = 10
"""Number of top-ranked layouts that are planned and simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A parallel layout: the degree of each axis. ``offload``: 0 nothing, 1 optimizer states to the host, 2 parameters,
    too."""

    stage: int
    tensor: int = 1
    stages: int = 1
    sequence: int = 1
    experts: int = 1
    offload: int = 0
    checkpointing: bool = False

    @property
    def model_ranks(self) -> int:
        """Number of ranks that work on the same samples."""
        return self.tensor * self.stages * self.sequence

    def __str__(self) -> str:
        axes = {"TP": self.tensor, "PP": self.stages, "SP": self.sequence, "EP": self.experts}
        parts = [f"ZeRO {self.stage}", *(f"{name} {size}" for name, size in axes.items() if size > 1)]
        parts += [("", "offload", "offload all")[self.offload]] if self.offload else []
        return ", ".join([*parts, *(["recompute"] if self.checkpointing else [])])


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned and simulated layout. ``need``: peak bytes per rank where the model computes; ``host``: bytes of host
    memory per node."""

    way: Way
    need: int
    host: int
    fits: bool
    time: StepTime
    samples: int

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.time.seconds if self.time.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Result of a search. ``rows``: layouts that fit, the fastest first, then the others. ``others``: number of layouts
    that were only ranked. ``samples``: per step; ``tokens``: per sample."""

    rows: Sequence[Planned]
    others: int
    samples: int
    tokens: int

    @property
    def best(self) -> Planned | None:
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def lines(self) -> list[str]:
        head = ("", "fits", "GiB/rank", "s/step", "tokens/s", "waits", "waits for")
        cells = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        title = f"a step of {self.samples} sample{'s' * (self.samples != 1)}" + (
            f" ({self.samples * self.tokens:,} tokens)" if self.tokens else ""
        )
        lines = [f"{title}, the fastest that fits first (predicted):"]
        for row in cells:
            first, *rest = [
                cell.ljust(width) if i in (0, 6) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append(("  " + "  ".join([first, *rest])).rstrip())
        if self.others:
            lines.append(f"  ({self.others} more ways were ranked by formulas, and left out)")
        best = self.best
        lines.append(f"fastest that fits: {best.way}" if best is not None else "nothing that was tried fits")
        return lines

    def _cells(self, row: Planned) -> tuple[str, ...]:
        waits = row.time.exposed / row.time.seconds if row.time.seconds else 0.0
        return (
            str(row.way),
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
                "way": str(row.way),
                **asdict(row.way),
                "bytes_per_rank": row.need,
                "fits": row.fits,
                "seconds": row.time.seconds,
                "compute": row.time.compute,
                "samples_per_second": row.rate,
            }
            for row in self.rows
        ]


@dataclass(slots=True, kw_only=True)
class StepSearch:
    """The search. ``request``: the config unchanged, for all ranks and the whole model. ``modules``: by expert-parallel
    degree, the model with its experts spread. ``job``: the hardware."""

    request: PlanRequest
    job: ParallelJob
    samples: int
    """Samples per step, over all ranks."""
    modules: Mapping[int, nn.Module] = field(default_factory=dict)
    numel: dict[int, int] = field(default_factory=dict)
    """Cache of parameter counts by expert-parallel degree."""

    def run(self) -> Choices:
        ways = list(self.ways())
        rough = {way: self._rough(way) for way in ways}
        ways.sort(key=lambda way: (rough[way], str(way)))
        chosen = list(ways[:PLANNED])
        chosen += [way for way in ways[PLANNED:] if way == Way(stage=way.stage)]
        rows = [row for way in chosen if (row := self._planned(way)) is not None]
        rows.sort(key=lambda row: (not row.fits, row.time.seconds if row.fits else row.need))
        return Choices(
            rows=rows, others=len(ways) - len(chosen), samples=self.samples, tokens=self.request.sequence or 0
        )

    # Enumeration of layouts ---------------------------------------------------------------------------------

    def ways(self) -> Iterator[Way]:
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
        apart = request.device_type != "cpu"
        again = [request.checkpointing]
        if shape is not None and request.sequence and not request.checkpointing:
            again.append(True)
        for stage, tp, pp, sp, ep, offload, checkpointing in itertools.product(
            range(4), tensor, stages, sequence, self.modules or [1], (0, 1, 2) if apart else (0,), again
        ):
            way = Way(
                stage=stage,
                tensor=tp,
                stages=pp,
                sequence=sp,
                experts=ep,
                offload=offload,
                checkpointing=checkpointing,
            )
            if self._possible(way, ranks):
                yield way

    def _possible(self, way: Way, ranks: int) -> bool:
        if ranks % way.model_ranks or self.samples % (ranks // way.model_ranks * self.micro):
            return False
        data = ranks // (way.tensor * way.stages)
        if data == 1 and way.stage > 0 and not way.offload:  # nothing to shard over: same as stage 0
            return False
        if way.experts > 1 and (data % way.experts or way.stages > 1):
            return False
        if way.stages > 1 and (way.stage > 1 or way.sequence > 1 or self.micro_batches(way) < way.stages):
            return False
        if way.offload and (way.stage == 0 or way.stages > 1):
            return False
        return way.offload < 2 or way.stage == 3

    @property
    def micro(self) -> int:
        return self.request.micro_batch or 1

    def micro_batches(self, way: Way) -> int:
        return self.samples // (self.request.ranks // way.model_ranks * self.micro)

    # Ranking by closed formulas -----------------------------------------------------------------------------

    def _rough(self, way: Way) -> tuple[bool, float]:
        """Estimate whether the layout exceeds device memory, and its step time in seconds."""
        numel = self._numel(way.experts) / (way.tensor * way.stages)
        data = self.request.ranks // (way.tensor * way.stages)
        weights, gradients, states = 2.0 * numel, 2.0 * numel, 12.0 * numel
        near = (weights / data if way.stage == 3 else weights) + (
            gradients / data if way.stage >= 2 else gradients
        )
        near += 0.0 if way.offload else states / data if way.stage else states
        have = self.request.capacity.device
        need = near + self._activations(way)
        seconds = self.job.rough_seconds(
            (way.tensor, way.stages, way.sequence),
            numel,
            data,
            self.micro_batches(way),
            way.stage,
            again=way.checkpointing,
        )
        if way.offload and self.job.device is not None:
            seconds += states / 12 / max(1, data) * self.job.device.host_update
        return have is not None and need > have, seconds

    def _activations(self, way: Way) -> float:
        shape, sequence = self.request.shape, self.request.sequence
        if shape is None or sequence is None:
            return 0.0
        split = Split(tensor=way.tensor, stages=way.stages, held=min(way.stages, self.micro_batches(way)))
        return activation_bytes(
            split.shape(shape),
            micro_batch=self.micro,
            sequence=-(-sequence // way.sequence),
            ranks_per_sequence=way.sequence,
            itemsize=2,
            checkpointing=way.checkpointing,
        )

    def _numel(self, experts: int) -> int:
        if experts not in self.numel:
            module = self.modules.get(experts, self.request.module)
            self.numel[experts] = sum(param.numel() for param in module.parameters())
        return self.numel[experts]

    def _module(self, way: Way) -> nn.Module:
        return self.modules.get(way.experts, self.request.module)

    # Planning and simulation --------------------------------------------------------------------------------

    def _planned(self, way: Way) -> Planned | None:
        try:
            found = [answer(self._request(way, stage)) for stage in sorted({0, way.stages - 1})]
        except (DeepSpeedConfigError, NotImplementedError, ValueError):
            return None
        near = MemoryPlace.DEVICE if self.request.device_type != "cpu" else MemoryPlace.HOST
        worst = max(found, key=lambda each: (bool(each.lacking()), each.ledger.peak(near)[0]))
        time = seconds_of(found, self.job, way.tensor, way.stages, way.sequence, way.experts)
        return Planned(
            way,
            worst.ledger.peak(near)[0],
            worst.need(MemoryPlace.HOST)[0],
            not any(each.lacking() for each in found),
            time,
            self.samples,
        )

    def _request(self, way: Way, stage: int) -> PlanRequest:
        request = self.request
        held = min(way.stages - stage, self.micro_batches(way))
        data = request.ranks // (way.tensor * way.stages)
        return replace(
            request,
            module=self._module(way),
            config=self._config(way),
            ranks=data,
            ranks_per_sequence=way.sequence,
            checkpointing=way.checkpointing,
            zero_init=way.stage == 3,
            micro_batch=self.micro,
            split=Split(tensor=way.tensor, stages=way.stages, stage=stage, held=held),
        )

    def _config(self, way: Way) -> dict[str, Any]:
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
        if way.stage < 3:
            zero = {key: value for key, value in zero.items() if not key.startswith(("zero_", "mics_"))}
        zero["stage"] = way.stage
        if way.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if way.offload == 2:
            zero["offload_param"] = {"device": "cpu"}
        config |= {"zero_optimization": zero, "gradient_accumulation_steps": self.micro_batches(way)}
        config["train_micro_batch_size_per_gpu"] = self.micro
        if way.sequence > 1:
            config["sequence_parallel_size"] = way.sequence
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
