"""The plan against real engines: what they own, what torch's allocator gave them, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.engine.observers.progress import start_report
from deepspeed.planning.ledger import (
    ESTIMATED,
    STEADY,
    TRAINING,
    Ledger,
    MemoryKind,
    MemoryPhase,
    MemoryPlace,
)
from deepspeed.planning.request import PlanAnswer, PlanRequest, answer
from deepspeed.zero.offload import swap_file
from tests.planning.memory.counting import Allocations, file_bytes, owned_bytes, watched
from tests.planning.memory.models import MODELS, NOTHING_KEPT, VOCABULARY, config_for
from tests.pool import distributed

TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
LION = {"type": "Lion", "params": {"lr": 1e-3}}
NVME = {"device": "nvme"}

PAIRS: dict[str, tuple[str, int, dict[str, Any]]] = {  # model, ranks, config
    "stage 0, fp32": ("gpt", 1, config_for(0)),
    "stage 0, bf16, 2 ranks": ("gpt", 2, config_for(0, bf16=True)),
    "stage 1, fp32, 2 micro-batches": ("gpt", 1, config_for(1, gas=2)),
    "stage 1, bf16, 2 ranks, 2 micro-batches": ("gpt", 2, config_for(1, bf16=True, gas=2)),
    "stage 2, fp32, 2 ranks, 2 micro-batches": ("gpt", 2, config_for(2, gas=2)),
    "stage 2, bf16": ("gpt", 1, config_for(2, bf16=True)),
    "stage 2, bf16, torch's AdamW": ("gpt", 2, config_for(2, bf16=True, optimizer=TORCH_ADAM)),
    "stage 2, Lion, adapters": ("adapted", 2, config_for(2, bf16=True, optimizer=LION)),
    "stage 3, fp32, everything kept": ("gpt", 2, config_for(3, gas=2)),
    "stage 3, bf16, nothing kept": ("gpt", 2, config_for(3, bf16=True, gas=2, **NOTHING_KEPT)),
    "stage 3, fp32, one rank, some kept": (
        "gpt",
        1,
        config_for(3, **{**NOTHING_KEPT, "stage3_max_live_parameters": 250_000}),
    ),
    "stage 1, autocast, 2 ranks": (
        "gpt",
        2,
        config_for(1) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ),
    "stage 2, bf16 summed in fp32": (
        "gpt",
        2,
        config_for(2, bf16=True, gas=2, overlap_comm=False) | {"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "stage 3, fp16, two replicas": (
        "gpt",
        2,
        config_for(3, mics_shard_size=1, **NOTHING_KEPT)
        | {"fp16": {"enabled": True, "initial_scale_power": 4}},
    ),
    "stage 3, adapters": ("adapted", 2, config_for(3, bf16=True, **NOTHING_KEPT)),
    "stage 1, bf16, state on storage": ("gpt", 1, config_for(1, bf16=True, offload_optimizer=NVME)),
    "stage 2, fp32, state on storage": ("gpt", 2, config_for(2, gas=2, offload_optimizer=NVME)),
    "stage 2, bf16, one buffer": (
        "gpt",
        2,
        config_for(2, bf16=True, offload_optimizer={**NVME, "buffer_count": 1}),
    ),
    "stage 3, bf16, everything on storage": (
        "gpt",
        2,
        config_for(
            3,
            bf16=True,
            offload_optimizer=NVME,
            offload_param={**NVME, "max_in_cpu": 100_000},
            **NOTHING_KEPT,
        ),
    ),
    "stage 3, fp32, parameters on storage": (
        "gpt",
        1,
        config_for(3, offload_param={**NVME, "max_in_cpu": 0}, **NOTHING_KEPT),
    ),
}


def with_folder(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    zero = {**config["zero_optimization"], "sub_group_size": 50_000}
    for key in ("offload_optimizer", "offload_param"):
        if key in zero:
            zero[key] = {**zero[key], "nvme_path": str(folder)}
    return {**config, "zero_optimization": zero}


def planned(name: str, config: dict[str, Any], ranks: int, device_type: str = "cpu") -> PlanAnswer:
    """The plan from a model without memory."""
    with torch.device("meta"):
        model = MODELS[name]()
    return answer(PlanRequest(module=model, config=config, ranks=ranks, device_type=device_type))


def train_step(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randint(VOCABULARY, (1,))))
        engine.step()


def kept(ledger: Ledger, phases: tuple[MemoryPhase, ...]) -> int:
    """Planned bytes of what an engine owns: without what belongs to autograd or to a single call."""
    passing = (*ESTIMATED, MemoryKind.UPDATE, MemoryKind.PINNING, MemoryKind.COMMUNICATION)
    return max(
        sum(
            n
            for place in (MemoryPlace.DEVICE, MemoryPlace.HOST)
            for k, n in ledger.kinds(phase, place).items()
            if k not in passing
        )
        for phase in phases
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_memory_of_a_run(pair: str, tmp_path: Path) -> None:
    _, ranks, config = PAIRS[pair]
    run = distributed(world_size=ranks)(compare)
    run(pair=pair, config=with_folder(config, tmp_path))


def compare(pair: str, config: dict[str, Any]) -> None:
    for dtype in (torch.bfloat16, torch.float16):  # once per process; the products would be counted otherwise
        start_report.slowdown(dtype)
    # Files that grow as needed: in steps of 64 MiB the small ones of this test would all look alike.
    with mock.patch.object(swap_file, "GROW_BYTES", swap_file.PAGE):
        compare_finely(pair, config)


def compare_finely(pair: str, config: dict[str, Any]) -> None:
    name, ranks, _ = PAIRS[pair]
    plan = planned(name, config, ranks)
    with Allocations() as allocations:
        model = MODELS[name]()
        with allocations.span("initialize"):
            engine, *_ = deepspeed.initialize(model=model, config=config)
        ready = owned_bytes(engine)
        with allocations.span("first"):
            train_step(engine)
        slots = sum(slot.buffer.numel() for slot in getattr(engine.core.store.tier, "slots", []))
        with watched(engine) as peak, allocations.span("steady"):
            train_step(engine)
            train_step(engine)
        slots_now = sum(slot.buffer.numel() for slot in getattr(engine.core.store.tier, "slots", []))
    ledger = plan.ledger
    assert allocations.peak("initialize") == pytest.approx(
        ledger.total(MemoryPhase.INITIALIZE, MemoryPlace.HOST), rel=0.02
    )
    # The allocator also sees activations, and scratch that no formula knows.
    seen, foreseen = allocations.peak("steady") + slots_now, ledger.peak(MemoryPlace.HOST, STEADY)[0]
    assert seen <= 1.03 * foreseen
    assert allocations.peak("first") + slots <= 1.03 * ledger.peak(MemoryPlace.HOST, TRAINING)[0]
    if engine.global_rank == 0:  # the plan is that of the rank with the least padding
        assert [b.layout for b in plan.setting.buckets] == layouts(engine)
        assert ready == kept(ledger, (MemoryPhase.READY,))
        assert peak[0] == pytest.approx(kept(ledger, STEADY), rel=1e-3)
        assert seen >= 0.97 * foreseen
        assert file_bytes(engine) == ledger.peak(MemoryPlace.DISK)[0]
    engine.destroy()


def layouts(engine: Any) -> list[Any]:
    if engine.sharded is not None:
        return [bucket.layout for bucket in engine.sharded.buckets]
    return [bucket.layout for bucket in engine.core.param_buckets]
