"""Stages 0 and 1 with another dtype on the wire: buckets pass it on, instead of each keeping a copy to the end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.pool import distributed


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_wire_buffers_are_reused_within_one_backward(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(10)))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "communication_data_type": "bf16",
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1024, "overlap_comm": True},
        },
    )
    buckets = engine.core.reducer.buckets
    assert len(buckets) == 10
    wires: set[int] = set()
    in_flight = 0
    for bucket in buckets:

        def launch(bucket=bucket, original=bucket.launch):
            nonlocal in_flight
            original()
            wires.add(bucket.in_flight.wire.data_ptr())
            in_flight = max(in_flight, sum(one.borrows for one in buckets))

        bucket.launch = launch
    for step in range(2):
        engine.backward(engine(torch.ones(2, 32) * (1 + dist.get_rank() + step)).square().mean())
        engine.step()
    assert len(wires) <= 3 and in_flight <= 2
    engine.destroy()
