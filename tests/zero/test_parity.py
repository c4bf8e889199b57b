"""fp32 training at every stage equals DDP with our optimizer and our norm, bit for bit."""

from __future__ import annotations

import pytest

from tests.pool import distributed
from tests.zero.models import assert_same, config_for, ddp_losses, engine_losses, make_zoo

STEPS = 7


@pytest.mark.parametrize("bucket", [1, 700, 500_000_000])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=[2, 4])
def test_equals_ddp(world_size: int, stage: int, overlap: bool, bucket: int) -> None:
    config = config_for(stage, overlap_comm=overlap, reduce_bucket_size=bucket)
    losses, weights, norms = engine_losses(make_zoo, config, STEPS)
    expected_losses, expected_weights, expected_norms = ddp_losses(make_zoo, STEPS, gas=1, clip=1.0)
    assert losses == expected_losses
    assert norms == expected_norms
    assert_same(weights, expected_weights)


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
    losses, weights, _ = engine_losses(make_zoo, config_for(stage, gas=3), STEPS, plain=plain)
    expected_losses, expected_weights, _ = ddp_losses(make_zoo, STEPS, gas=3, clip=1.0)
    assert losses == expected_losses
    assert_same(weights, expected_weights)
