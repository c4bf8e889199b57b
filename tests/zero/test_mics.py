"""MiCS against plain stage 3: the same training, gathers inside groups only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.zero.gathering import sharded_model
from tests.pool import distributed
from tests.zero.models import assert_same, batch, config_for, engine_losses, make_zoo

STEPS = 4
NOTHING = {
    "stage3_param_persistence_threshold": 30,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
BUDGETS: dict[str, dict[str, Any]] = {"keep all": {}, "keep nothing": NOTHING}


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-5, atol=1e-6)


def assert_ranks_agree(weights: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        first = value.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, value), name


@pytest.mark.parametrize("budget", list(BUDGETS))
@pytest.mark.parametrize("size", [1, 2])
@distributed(world_size=4)
def test_equals_stage_3(size: int, budget: str) -> None:
    mics = config_for(3, gas=2, mics_shard_size=size, **BUDGETS[budget])
    losses, weights, norms = engine_losses(make_zoo, mics, STEPS)
    plain = config_for(3, gas=2, **BUDGETS[budget])
    expected_losses, expected, expected_norms = engine_losses(make_zoo, plain, STEPS)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    assert_close(weights, expected)
    assert_ranks_agree(weights)


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=4)
def test_stages_with_whole_parameters(stage: int) -> None:
    """Gradients and states in shards of a group; the same training."""
    losses, weights, norms = engine_losses(make_zoo, config_for(stage, gas=2, mics_shard_size=2), STEPS)
    expected_losses, expected, expected_norms = engine_losses(make_zoo, config_for(stage, gas=2), STEPS)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    assert_close(weights, expected)
    assert_ranks_agree(weights)


@pytest.mark.parametrize(("world", "size"), [(2, 1), (2, 2)])
@distributed(world_size=2)
def test_bit_for_bit_where_sums_have_one_order(world: int, size: int) -> None:
    losses, weights, norms = engine_losses(make_zoo, config_for(3, mics_shard_size=size, **NOTHING), STEPS)
    expected_losses, expected, expected_norms = engine_losses(make_zoo, config_for(3, **NOTHING), STEPS)
    assert (losses, norms) == (expected_losses, expected_norms)
    assert_same(weights, expected)


@distributed(world_size=4)
def test_scheduled_collectives() -> None:
    """The way that GPUs go."""
    mics = config_for(3, mics_shard_size=2, mics_hierarchical_params_gather=True, **NOTHING)
    chosen = sharded_model.prefers_collectives
    sharded_model.prefers_collectives = lambda device_type: True
    try:
        losses, weights, _ = engine_losses(make_zoo, mics, STEPS)
    finally:
        sharded_model.prefers_collectives = chosen
    expected_losses, expected, _ = engine_losses(make_zoo, mics, STEPS)
    assert losses == expected_losses
    assert_same(weights, expected)


def start(zero: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    model = make_zoo() if model is None else model
    return deepspeed.initialize(model=model, config={**config_for(3, **zero), **more})[0]


def run(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, 0, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@distributed(world_size=4)
def test_shards_and_bytes() -> None:
    """Each rank holds 1/2; gathers stay in the group; between groups goes one shard per gradient."""
    engine = start({"mics_shard_size": 2, **NOTHING, "stage3_param_persistence_threshold": 0})
    groups = engine.sharded.replica_groups.dense
    rank = dist.get_rank()
    assert groups.shard.ranks == ((0, 1), (2, 3))[rank // 2]
    assert groups.replicas.ranks == ((0, 2), (1, 3))[rank % 2]
    buckets = engine.sharded.buckets
    assert all(2 * b.shard.numel() == b.layout.padded_numel for b in buckets)
    assert engine.module.twice.weight.ds_process_group is groups.shard.group
    run(engine, 0, 1)
    before = groups.replicas.bytes_sent
    run(engine, 1, 2)
    trained = sum(b.shard.numel() for b in engine.sharded.trained_buckets)
    assert groups.replicas.bytes_sent - before == 4 * trained  # all-reduce over two: 2 (2-1)/2 per element
    assert groups.replicas.collectives.keys() == {"all_reduce"}
    everyone = groups.all_ranks.collectives
    assert "all_gather" not in everyone or everyone["all_gather"] <= 1  # that the models are equal
    assert "reduce_scatter" not in everyone
    engine.destroy()


@pytest.mark.parametrize("optimizer", ["Lamb", "Muon"])
@distributed(world_size=4)
def test_optimizers_of_whole_tensors(optimizer: str) -> None:
    section = {"optimizer": {"type": optimizer, "params": {"lr": 0.01, "weight_decay": 0.1}}}
    engine = start({"mics_shard_size": 2}, **section)
    losses = run(engine, 0, STEPS)
    engine.destroy()
    twin = start({}, **section)
    torch.testing.assert_close(losses, run(twin, 0, STEPS), rtol=1e-4, atol=1e-4)
    twin.destroy()
    assert_ranks_agree(engine.module.state_dict())


@distributed(world_size=4)
def test_full_values_and_edits() -> None:
    engine = start({"mics_shard_size": 2, **NOTHING})
    run(engine, 0, 2)
    weight = engine.module.twice.weight
    with deepspeed.zero.GatheredParameters(weight):
        master = deepspeed.utils.safe_get_full_fp32_param(weight)
        assert torch.equal(master, weight)
    moment = deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert_ranks_agree({"master": master, "moment": moment})
    assert moment.abs().max() < 1  # not counted twice
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=3):
        weight.data.fill_(float(dist.get_rank()))
    assert (deepspeed.utils.safe_get_full_fp32_param(weight) == 3).all()
    engine.destroy()
    assert (engine.module.twice.weight == 3).all()


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (2, -1), (-1, 2), (1, 2)])
@distributed(world_size=4)
def test_checkpoints_fit_other_groups(tmp_path: Path, saved: int, loaded: int) -> None:
    engine = start({"mics_shard_size": saved, **NOTHING})
    losses = run(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path), tag="t")
    if dist.get_rank() == 0:
        assert_written_once(tmp_path / "t", copies_at=saved if saved > 0 else 4)
    expected = run(engine, 2, 5)
    engine.destroy()
    engine = start({"mics_shard_size": loaded, **NOTHING}, make_zoo(seed=9))
    engine.load_checkpoint(str(tmp_path))
    torch.testing.assert_close(run(engine, 2, 5), expected, rtol=1e-6, atol=1e-6)
    assert len(losses) == 2
    engine.destroy()


def assert_written_once(folder: Path, copies_at: int) -> None:
    """Each fragment is in one file, of the first ``copies_at`` ranks; every rank has one for its random state."""
    holders: dict[object, list[int]] = {}
    for rank in range(4):
        states = torch.load(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        for shard in states["optimizer_state_dict"]["shards"]:
            holders.setdefault(shard, []).append(rank)
        for part in torch.load(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")[
            "checkpoint_index"
        ]["parts"]:
            if part[-1]:
                holders.setdefault((part, "weights"), []).append(rank)
        assert "random" in states["checkpoint_index"]["rank_state"]
    assert {len(ranks) for ranks in holders.values()} == {1}
    assert {ranks[0] for ranks in holders.values()} == set(range(copies_at))


@pytest.mark.parametrize("plain_engine", [True, False])
@distributed(world_size=4)
def test_mics_init(plain_engine: bool) -> None:
    zero = {"mics_shard_size": 2, **NOTHING}
    with deepspeed.zero.MiCS_Init(config_dict_or_path=config_for(3, **zero)) as context:
        torch.manual_seed(dist.get_rank())  # as with zero.Init, rank 0 decides
        model = make_zoo(seed=dist.get_rank())
        assert context.num_partitions == 2
        assert context.get_partition_rank() == dist.get_rank() % 2
        assert model.twice.weight.ds_tensor.numel() == 72
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        whole = make_zoo()
        assert_same({k: v.clone() for k, v in model.state_dict().items()}, whole.state_dict())
    engine = start(NOTHING if plain_engine else zero, model)
    losses = run(engine, 0, 2)
    engine.destroy()
    twin = start(NOTHING)
    torch.testing.assert_close(losses, run(twin, 0, 2), rtol=1e-6, atol=1e-6)
    twin.destroy()


@distributed(world_size=2)
def test_refusals() -> None:
    with pytest.raises(DeepSpeedConfigError, match="mics_shard_size=3 must divide"):
        start({"mics_shard_size": 3})
    with pytest.raises(DeepSpeedConfigError, match="MiCS_Init needs"):
        deepspeed.zero.MiCS_Init(config_dict_or_path=config_for(3))
    with deepspeed.zero.MiCS_Init(enabled=False):
        assert not hasattr(nn.Linear(2, 2).weight, "ds_id")


@distributed(world_size=2)
def test_existing_module() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(4, 6)
    settings = {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}
    deepspeed.zero.MiCS_Init(module, config_dict_or_path=settings)
    assert module.weight.ds_tensor.numel() == 24
    with deepspeed.zero.GatheredParameters(module.weight):
        assert_ranks_agree({"weight": module.weight.detach()})
