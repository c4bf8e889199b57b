"""fp32 training at every stage equals DDP with our optimizer and our norm, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.pool import distributed
from tests.zero.models import (
    assert_same,
    batch,
    config_for,
    ddp_losses,
    engine_losses,
    make_zoo,
    uses_sometimes,
)

STEPS = 7


# Any three of the four come together; all four in the slow test below.
CASES = [
    (4 if (stage + overlap + number) % 2 else 2, stage, overlap, bucket)
    for stage in (0, 1, 2)
    for overlap in (True, False)
    for number, bucket in enumerate((1, 700, 500_000_000))
]


@pytest.mark.parametrize(("world_size", "stage", "overlap", "bucket"), CASES)
@distributed()
def test_equals_ddp(world_size: int, stage: int, overlap: bool, bucket: int) -> None:
    config = config_for(stage, overlap_comm=overlap, reduce_bucket_size=bucket)
    losses, weights, norms = engine_losses(make_zoo, config, STEPS)
    expected_losses, expected_weights, expected_norms = ddp_losses(make_zoo, STEPS, gas=1, clip=1.0)
    assert losses == expected_losses
    assert norms == expected_norms
    assert_same(weights, expected_weights)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("bucket", [1, 700, 500_000_000])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=[2, 4], timeout=120)
def test_equals_ddp_for_a_hundred_steps(
    world_size: int, stage: int, overlap: bool, bucket: int, clip: float
) -> None:
    config = config_for(stage, clip=clip, overlap_comm=overlap, reduce_bucket_size=bucket)
    losses, weights, norms = engine_losses(make_zoo, config, 100)
    expected_losses, expected_weights, expected_norms = ddp_losses(make_zoo, 100, gas=1, clip=clip)
    assert losses == expected_losses
    assert norms == expected_norms
    assert_same(weights, expected_weights)


@distributed(world_size=[1, 2, 3, 4])
def test_equals_one_process_with_torch(world_size: int) -> None:
    """The other oracle: one process, torch's AdamW and clipping, the mean over the ranks' batches."""
    losses, weights, _ = engine_losses(make_zoo, config_for(2), STEPS)
    model = make_zoo()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    expected = []
    for step in range(STEPS):
        parts = [model(batch(step, 0, r), uses_sometimes(step, r)) for r in range(world_size)]
        torch.stack(parts).mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(parts[torch.distributed.get_rank()].item())
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_clipping_and_groups(stage: int, clip: float) -> None:
    losses, weights, _ = engine_losses(make_zoo, config_for(stage, clip=clip), STEPS, groups=True)
    expected_losses, expected_weights, _ = ddp_losses(make_zoo, STEPS, gas=1, clip=clip, groups=True)
    assert losses == expected_losses
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
@distributed(world_size=2)
def test_accumulation_reduces_once(stage: int, plain: bool) -> None:
    gas = 4 if plain else 3  # where the division is exact, it does not matter what is divided
    losses, weights, _ = engine_losses(make_zoo, config_for(stage, gas=gas), STEPS, plain=plain)
    expected_losses, expected_weights, _ = ddp_losses(make_zoo, STEPS, gas=gas, clip=1.0)
    assert losses == expected_losses
    assert_same(weights, expected_weights)
