"""The frequency of gradient sums may change between two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.config.plan import Cadence
from tests.pool import distributed
from tests.zero.simulated_ranks import (
    BETA,
    LR,
    SimulatedRanks,
    config_of,
    loss_of,
    make_model,
    train_batch,
)

BOUNDARY, EVERY, NEVER = Cadence.AT_BOUNDARY, Cadence.EVERY_MICRO_BATCH, Cadence.NEVER


def make_engine(
    stage: int, dtype: torch.dtype, micro_batches: int = 1, clip: float = 0.0, **more: Any
) -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=BETA)
    config = config_of(stage, dtype, micro_batches, clip, dist.get_world_size()) | more
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_size=[2, 4])
def test_ranks_on_their_own_for_a_while(world_size: int, dtype: torch.dtype) -> None:
    """Steps 1 to 3 update with this rank's own gradients, clipped by a norm that all ranks know."""
    rank, micro_batches, clip = dist.get_rank(), 2, 2.0
    engine = make_engine(0, dtype, micro_batches, clip)
    oracle = SimulatedRanks(world_size, dtype=dtype, micro_batches=micro_batches, clip=clip)
    announced = {0: NEVER, 3: BOUNDARY}
    everyone = engine.replica_groups.all_ranks
    for step in range(5):
        if step in announced:
            engine.core.executor.announce(announced[step])
        everyone.reset_counters()
        train_batch(engine, step, micro_batches, dtype, rank)
        alone = 1 <= step <= 3
        oracle.step(step, average_gradients=not alone)
        if step:  # the first one agrees on the order of the buckets
            assert everyone.collectives["all_reduce"] == (1 if alone else 2)  # the facts; the gradients
        assert engine.get_global_grad_norm() == pytest.approx(oracle.norm, rel=1e-6)
        for param, expected in zip(engine.module.parameters(), oracle.models[rank].parameters(), strict=True):
            assert torch.equal(param, expected), step


@distributed(world_size=2)
def test_stages_agree_at_every_cadence() -> None:
    """Between steps the cadence goes to and fro: the sums are the same at stages 0 to 2, to the bit."""
    cadences = [EVERY, BOUNDARY, EVERY, EVERY, BOUNDARY]
    found = []
    for stage in (0, 1, 2):
        engine = make_engine(stage, torch.float32, 3)
        engine.core.reducer.change_cadence(BOUNDARY)
        for step, cadence in enumerate(cadences):
            train_batch(engine, step, 3, torch.float32, dist.get_rank())
            engine.core.reducer.change_cadence(cadence)
        assert engine.core.reducer.cadence is cadences[-1]
        found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.destroy()
    for weights in zip(*found, strict=True):
        assert all(torch.equal(weights[0], other) for other in weights)


@distributed(world_size=2)
def test_what_is_refused_and_what_is_released() -> None:
    for stage in (1, 2, 3):
        engine = make_engine(stage, torch.float32)
        with pytest.raises(ValueError, match="must be summed"):
            engine.core.executor.announce(NEVER)
        engine.destroy()
    engine = make_engine(0, torch.bfloat16, 2, data_types={"grad_accum_dtype": "fp32"})
    reducer = engine.core.reducer
    train_batch(engine, 0, 2, torch.bfloat16, dist.get_rank())
    pools = {bucket.pool for bucket in reducer.buckets}
    assert any(pool._free for pool in pools)  # wires in bf16
    engine.backward(loss_of(engine, 1, 0, dist.get_rank(), torch.bfloat16))
    engine.step()
    with pytest.raises(RuntimeError, match="between steps only"):
        reducer.change_cadence(NEVER)
    reducer.clear()
    reducer.change_cadence(NEVER)
    assert not any(pool._free for pool in pools)
