"""Models with activations that are small compared with their weights, so that the counted memory is the planned one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.config.plan import Plan
from deepspeed.parallel.expert.layer import MoE
from deepspeed.planning.planned_model import PlannedModel, cast_dtype
from deepspeed.zero.layout import ParamSpec
from tests.zero.models import Block

VOCABULARY, WIDTH = 1000, 128


class Gpt(nn.Module):
    """Embedding, blocks, norm and a head that shares the embedding's weight."""

    def __init__(self, blocks: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x) * self.scale.to(x.dtype))
        return nn.functional.cross_entropy(logits.float(), ids)


class Adapted(Gpt):
    """The same with frozen weights and small adapters that are trained."""

    def __init__(self) -> None:
        super().__init__(blocks=24)
        self.requires_grad_(False)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)) for _ in range(24)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = block(x) + adapter(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float(), ids)


MODELS: dict[str, type[nn.Module]] = {"gpt": Gpt, "adapted": Adapted}


def small() -> Gpt:
    """For ``ds plan --model tests.planning.memory.models:small``."""
    return Gpt()


def mixture() -> nn.Module:
    """1,048,576 parameters in 8 experts, of which a rank of two holds 4, and 64 x 8 in the gate."""
    return MoE(64, nn.Linear(64, 2048, bias=False), num_experts=8, ep_size=2)


def config_for(
    stage: int, *, bf16: bool = False, gas: int = 1, optimizer: dict[str, Any] | None = None, **zero: Any
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "bf16": {"enabled": bf16},
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200_000, **zero},
    }


NOTHING_KEPT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 1000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRow:
    """One parameter of a model that is described rather than built."""

    name: str
    numel: int
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    unit: int = 0


def planned_model_of_rows(rows: Iterable[ParamRow], plan: Plan) -> PlannedModel:
    """Facts about a model given as a list; a unit is a block, in order of execution."""
    listed = list(rows)
    ordered = [r for r in listed if r.requires_grad] + [r for r in listed if not r.requires_grad]
    specs: list[ParamSpec] = []
    calls: dict[int, list[int]] = {}
    for i, row in enumerate(ordered):
        dtype = cast_dtype(row.dtype, plan.precision)
        specs.append(
            ParamSpec(
                index=i,
                name=row.name,
                numel=row.numel,
                dtype=dtype,
                unit=row.unit,
                wire_dtype=plan.precision.reduce or dtype,
                requires_grad=row.requires_grad,
            )
        )
        calls.setdefault(row.unit, []).append(i)
    trained = sum(row.requires_grad for row in ordered)
    return PlannedModel(
        specs=specs,
        trained=trained,
        group_of=[0] * trained,
        calls=[calls[unit] for unit in sorted(calls)],
        built_itemsizes=[row.dtype.itemsize for row in ordered],
    )
