"""Experts with other features, each against one process that holds all experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.collectives import use_shared_memory
from deepspeed.parallel.expert.utils import is_moe_param
from deepspeed.zero.tensor_fragment import safe_set_full_fp32_param
from tests.parallel.expert.models import (
    Model,
    assert_engine_equals_alone,
    assert_equals_alone,
    batch,
    config,
    start,
)
from tests.pool import distributed


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_states_and_weights_in_files(stage: int, tmp_path: Path) -> None:
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": files, **({"offload_param": files} if stage == 3 else {})}
    assert_equals_alone(config(stage, zero=zero), 2)


@distributed(world_size=2)
def test_weights_in_host_memory() -> None:
    here = {"device": "cpu"}
    assert_equals_alone(config(3, zero={"offload_optimizer": here, "offload_param": here}), 2)


def by_torch(block: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(block, hidden, use_reentrant=False)


def by_section(block: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return deepspeed.transforms.recompute.checkpointing.checkpoint(block, hidden)


@pytest.mark.parametrize(("stage", "how"), [(1, by_section), (3, by_torch)])
@distributed(world_size=2)
def test_recomputed_layers(stage: int, how: Any) -> None:
    """The exchange runs again in backward."""
    assert_equals_alone(config(stage), 2, recompute=how)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_compiled(stage: int) -> None:
    """Everything around the exchange runs unchanged."""
    init = nn.Module.__init__
    engine = start(config(stage), 2)
    try:
        engine.compile(backend="eager")
        assert_engine_equals_alone(engine, Model(1))
    finally:
        nn.Module.__init__ = init  # torch's compiler patches it for good
    engine.destroy()


@pytest.mark.parametrize("ep_size", [1, 2])
@distributed(world_size=4)
def test_built_in_parts(ep_size: int) -> None:
    """``zero.Init`` around the construction: no rank ever holds a whole model."""
    settings = config(3)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = Model(ep_size)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    alone = Model(1)
    for name, param in engine.module.named_parameters():
        safe_set_full_fp32_param(param, alone.get_parameter(name).detach())
    assert_engine_equals_alone(engine, alone)
    engine.destroy()


def halves(tokens: int, ranks: Any, device: Any) -> list[slice]:
    return [slice(0, tokens // 2), slice(tokens // 2, tokens)]


@pytest.mark.parametrize(("stage", "shared_memory"), [(1, True), (3, True), (2, False)])
@distributed(world_size=2)
def test_the_exchange_of_one_half_during_the_work_of_the_other(stage: int, shared_memory: bool) -> None:
    """Both in forward and in backward."""
    use_shared_memory(shared_memory)
    try:
        with mock.patch("deepspeed.parallel.expert.dispatch.halve", halves):
            assert_equals_alone(config(stage), 2)
    finally:
        use_shared_memory(True)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_fp16(stage: int) -> None:
    """Losses follow those of fp32; a step in which one expert overflows is skipped on every rank."""
    losses = []
    for more in ({}, {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}):
        engine, found = start(config(stage, **more), 2), []
        for step in range(4):
            loss = engine(batch(step, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        losses.append(found)
        if more:
            scale = engine.optimizer.cur_scale
            engine.backward(engine(batch(4, dist.get_rank())) * (float("inf") if dist.get_rank() else 1.0))
            engine.step()
            assert engine.skipped_steps == 1 and engine.optimizer.cur_scale < scale
        engine.destroy()
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_frozen_experts_stay(stage: int, tmp_path: Path) -> None:
    """Gates train, tokens pass; checkpoints hold the frozen experts of all ranks."""

    def begin(ep_size: int) -> Any:
        model = Model(ep_size)
        for param in model.parameters():
            param.requires_grad_(not is_moe_param(param))
        return deepspeed.initialize(model=model, config=config(stage))[0]

    engine = begin(2)
    for step in range(2):
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()
    engine.save_checkpoint(tmp_path)
    with torch.no_grad():
        wanted = engine(batch(2, 0))
    gates = [block.moe.deepspeed_moe.gate.wg.weight for block in engine.module.blocks]
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for param, fresh in zip(engine.module.parameters(), Model(2).parameters(), strict=True):
            assert torch.equal(param, fresh) == is_moe_param(param)
        assert all(gate.requires_grad for gate in gates)
    engine.destroy()
    second = begin(1)
    for param in second.module.parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            if is_moe_param(param):
                param.zero_()
    second.load_checkpoint(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(second(batch(2, 0)), wanted, rtol=1e-5, atol=1e-6)
    second.destroy()
