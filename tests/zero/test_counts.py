"""Counts: bytes on the wire, collectives, bytes of model states per rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.pool import distributed
from tests.zero.models import Block

WIDTH = 64


def start(stage: int, gas: int = 1, bf16: bool = True, **zero: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, **zero},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def train_step(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(4, WIDTH)).float().square().mean())
        engine.step()


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=[2, 4])
def test_bytes_on_the_wire(world_size: int, stage: int, gas: int) -> None:
    """Stages 0 and 1 send 4(N-1)/N bytes per parameter and step in bf16, stage 2 (2g+2)(N-1)/N."""
    engine = start(stage, gas)
    numel = sum(p.numel() for p in engine.module.parameters())
    communicator = engine.core.reducer.communicator
    train_step(engine)  # the first step also agrees on the launch order
    before = communicator.bytes_sent
    train_step(engine)
    sent = communicator.bytes_sent - before
    per_param = 2 * gas + 2 if stage == 2 else 4
    expected = per_param * (world_size - 1) / world_size * numel
    report = 16 * (2 + len(engine.core.trained.params))  # the one small all-reduce of the step
    assert expected <= sent <= 1.01 * expected + report
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_collectives_per_step(stage: int) -> None:
    engine = start(stage, gas=2)
    communicator = engine.core.reducer.communicator
    train_step(engine)
    communicator.reset_counters()
    train_step(engine)
    buckets = len(engine.core.param_buckets)
    expected = {
        0: {"all_reduce": buckets + 1},
        1: {"reduce_scatter": buckets, "all_gather": buckets, "all_reduce": 1},
        2: {"reduce_scatter": 2 * buckets, "all_gather": buckets, "all_reduce": 1},
    }[stage]
    assert dict(communicator.collectives) == expected
    engine.destroy()


NOTHING_KEPT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("kept", [True, False])
@distributed(world_size=[2, 4])
def test_stage_3_bytes_on_the_wire(world_size: int, kept: bool, gas: int) -> None:
    """4(N-1)/N bytes per parameter and step when the budget keeps everything, 6g(N-1)/N when it keeps nothing."""
    engine = start(3, gas, **({"stage3_param_persistence_threshold": 0} if kept else NOTHING_KEPT))
    numel = sum(p.ds_numel for p in engine.module.parameters())
    communicator = engine.core.reducer.communicator
    train_step(engine)
    before = communicator.bytes_sent
    train_step(engine)
    sent = communicator.bytes_sent - before
    expected = (4 if kept else 6 * gas) * (world_size - 1) / world_size * numel
    report = 16 * (2 + len(engine.core.trained.params))
    # The last block's weights serve forward and backward with one gather.
    assert 0.9 * expected <= sent <= 1.01 * expected + report
    engine.destroy()


@pytest.mark.parametrize("bf16", [True, False])
@distributed(world_size=[2, 4])
def test_stage_3_model_states_per_rank(world_size: int, bf16: bool) -> None:
    """16/N bytes per parameter, two gather units and one gradient bucket."""
    engine = start(3, bf16=bf16, **NOTHING_KEPT)
    peak = 0

    def watch(*_: Any) -> None:
        nonlocal peak
        full = [b.full for b in engine.sharded.buckets]
        peak = max(
            peak, held_bytes(engine) + storage_bytes([t for t in full if t.untyped_storage().nbytes()])
        )

    for block in engine.module:
        block.register_forward_hook(watch)
        block.register_full_backward_hook(watch)
    for _ in range(2):
        train_step(engine)
    numel = sum(p.ds_numel for p in engine.module.parameters())
    unit = max(b.layout.padded_numel for b in engine.sharded.buckets) * (2 if bf16 else 4)
    assert 0 < peak <= 1.03 * 16 / world_size * numel + 3 * unit
    engine.destroy()


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def held_bytes(engine: Any) -> int:
    """Parameters, gradients and optimizer state that stay allocated through a step, each storage once."""
    core = engine.core
    if engine.sharded is None:
        tensors = [p.data for p in engine.module.parameters()]
    else:
        tensors = [bucket.shard for bucket in engine.sharded.buckets]
    for bucket in core.reducer.buckets:
        tensors += [t for t in (bucket._owned, bucket._shard) if t is not None]
    for owned in core.store.fragments:
        tensors.append(owned.master)
        tensors += [v for v in core.store.state_of(owned).values() if isinstance(v, torch.Tensor) and v.dim()]
    return storage_bytes(tensors)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=[2, 4])
def test_model_states_per_rank(world_size: int, stage: int, bf16: bool) -> None:
    """bf16: stage 1 4 + 12/N bytes per parameter, stage 2 2 + 14/N; fp32: 8 + 8/N and 4 + 12/N."""
    engine = start(stage, bf16=bf16)
    train_step(engine)
    numel = sum(p.numel() for p in engine.module.parameters())
    n = world_size
    formula = {(1, True): 4 + 12 / n, (2, True): 2 + 14 / n, (1, False): 8 + 8 / n, (2, False): 4 + 12 / n}
    largest = max(b.layout.padded_numel for b in engine.core.param_buckets) * (2 if bf16 else 4)
    assert held_bytes(engine) <= 1.03 * formula[stage, bf16] * numel + largest
    engine.destroy()


@distributed(world_size=2)
def test_stage_2_borrows_at_most_two_gradient_buckets() -> None:
    engine = start(2)
    pool = engine.core.reducer.buckets[0].pool
    for _ in range(3):
        train_step(engine)
    largest = max(b.layout.padded_numel for b in engine.core.param_buckets) * 2
    free = [t for buffers in pool._free.values() for t in buffers]
    assert storage_bytes(free) <= 2 * largest
    assert dist.get_world_size() == 2
    engine.destroy()
