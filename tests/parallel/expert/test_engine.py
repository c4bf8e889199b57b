"""A model with experts, trained over ranks, against one process that holds all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm import documented_groups as groups
from deepspeed.zero.tensor_fragment import safe_get_full_grad, safe_set_full_fp32_param
from tests.parallel.expert.models import EXPERTS, HIDDEN, assert_equals_alone, batch, config, start
from tests.pool import distributed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
@distributed(world_size=(2, 4))
def test_equals_one_process(world_size: int, ep_size: int, stage: int) -> None:
    if ep_size <= world_size:
        assert_equals_alone(config(stage), ep_size)


@pytest.mark.parametrize(
    ("stage", "ep_size", "settings", "model"),
    [
        (2, 2, {}, {"k": 1, "drop_tokens": True, "capacity_factor": 0.5, "min_capacity": 1}),
        (3, 4, {}, {"k": 3}),
        (1, 2, {}, {"pyramid": (2, 8), "use_residual": True}),
        (2, 2, {"use_data_before_expert_parallelism": True}, {}),
        (3, 2, {"use_data_before_expert_parallelism": True}, {}),
        (3, 2, {"clip": 0.0, "zero": {"mics_shard_size": 2}}, {}),
        (2, 4, {"zero": {"offload_optimizer": {"device": "cpu"}}}, {"k": 1}),
        (3, 2, {"zero": {"stage3_max_live_parameters": 10**9}}, {}),
    ],
    ids=str,
)
@distributed(world_size=4)
def test_combinations(stage: int, ep_size: int, settings: dict[str, Any], model: dict[str, Any]) -> None:
    apart = "use_data_before_expert_parallelism" in settings
    assert_equals_alone(config(stage, **settings), ep_size, apart=apart, **model)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=4)
def test_experts_that_nobody_uses(stage: int) -> None:
    """All tokens go to expert 0; the others have zeros as gradients on every rank, and nothing hangs."""
    engine = start(config(stage), 4, k=1)
    for block in engine.module.blocks:
        safe_set_full_fp32_param(block.moe.deepspeed_moe.gate.wg.weight, torch.zeros(EXPERTS, HIDDEN))
    engine.backward(engine(batch(0, dist.get_rank())))
    for block in engine.module.blocks:
        for param in block.moe.deepspeed_moe.experts.parameters():
            assert bool(safe_get_full_grad(param).any()) == (dist.get_rank() == 0)
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_bf16(stage: int) -> None:
    """The gate computes in fp32; losses follow those of fp32."""
    losses = []
    for more in ({}, {"bf16": {"enabled": True}}):
        engine, found = start(config(stage, **more), 2), []
        for step in range(4):
            loss = engine(batch(step, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        losses.append(found)
        engine.destroy()
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_the_router_s_gradient_stays_in_full_under_autocast(stage: int) -> None:
    """It is computed in fp32. In bf16 it would no longer add up to nothing over experts, of which Muon makes much."""
    settings = config(stage, clip=0.0, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine = start(settings, 2)
    engine.backward(engine(batch(0, dist.get_rank())))
    for block in engine.module.blocks:
        found = safe_get_full_grad(block.moe.deepspeed_moe.gate.wg.weight)
        assert found is not None and float(found.norm()) > 1e-4
        assert float(found.sum(0).norm()) < 1e-5 * float(found.norm())
    engine.destroy()


@distributed(world_size=2)
def test_bytes_of_the_exchange() -> None:
    """2 k h per token times the share that leaves the rank, forward and again backward, and the counts."""
    engine = start(config(0), 2, pyramid=(EXPERTS,), k=1)
    layer = engine.module.blocks[0].moe.deepspeed_moe
    with torch.no_grad():
        layer.gate.wg.weight.zero_()  # all tokens go to rank 0
    ranks = layer._ranks
    ranks.reset_counters()
    loss = engine.module(batch(0, dist.get_rank()))
    torch.autograd.grad(loss, engine.module.embed.weight)
    rows = batch(0, 1).numel()  # rank 1 sends them there and gets gradients back, rank 0 the opposite
    assert ranks.collectives["all_to_all"] == 5
    assert ranks.bytes_sent == 2 * rows * HIDDEN * 4 + EXPERTS // 2 * 8
    engine.destroy()


@distributed(world_size=4)
def test_groups_of_the_engine() -> None:
    engine, rank = start(config(2), 2), dist.get_rank()
    sharing, same = engine.expert_parallel_group, engine.expert_data_parallel_group
    assert list(sharing) == list(same) == ["ep_size_2"]
    assert groups._EXPERT_PARALLEL_GROUP == groups._get_expert_parallel_group_dict() == sharing
    assert same == groups._EXPERT_DATA_PARALLEL_GROUP
    assert {"ep_size_2": [rank % 2, rank % 2 + 2]} == groups._EXPERT_DATA_PARALLEL_GROUP_RANKS
    assert dist.get_all_ranks_from_group(sharing["ep_size_2"]) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_all_ranks_from_group(same["ep_size_2"]) == [rank % 2, rank % 2 + 2]
    assert dist.get_world_size(engine.seq_data_parallel_group) == 4
    engine.destroy()
    assert groups._EXPERT_PARALLEL_GROUP == groups._EXPERT_DATA_PARALLEL_GROUP == {}


@distributed(world_size=4)
def test_groups_of_ranks() -> None:
    rank, engine = dist.get_rank(), start(config(1), 2)
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2
    assert groups._get_expert_parallel_rank("ep_size_2") == rank % 2
    assert groups._get_expert_data_parallel_rank("ep_size_2") == rank // 2
    group = groups._get_expert_parallel_group("ep_size_2")
    assert torch.distributed.get_process_group_ranks(group) == [rank - rank % 2, rank - rank % 2 + 1]
    assert engine.has_moe_layers and engine.num_experts == [EXPERTS, EXPERTS]
    with pytest.raises(ValueError, match=r"ep_size=3 does not divide the 4 ranks.*\[1, 2, 4\]"):
        groups._get_expert_parallel_group("ep_size_3")
    engine.destroy()


@distributed(world_size=2)
def test_more_ranks_for_the_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"ep_size=4 does not divide the 2 ranks"):
        start(config(1), 4)
