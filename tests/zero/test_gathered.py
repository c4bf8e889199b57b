"""GatheredParameters exited with an error on some ranks: all ranks raise, changes are dropped, work continues.

None of it waits for the timeout of the process group, which is longer than that of a test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.pool import distributed

LIVE = {
    "everything stays gathered": {},
    "beyond the budget": {"stage3_max_live_parameters": 10, "stage3_max_reuse_distance": 0},
}


def start(init: bool = False, **section: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20, **section},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=init):
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))  # the weights are not persistent
    return model if init else deepspeed.initialize(model=model, config=config)[0]


def weights(params: list[Tensor]) -> list[Tensor]:
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def spoil(params: list[Tensor], modifier: int, failing: tuple[int, ...], fail: Callable[[], None]) -> None:
    with torch.no_grad(), deepspeed.zero.GatheredParameters(params, modifier_rank=modifier):
        for param in params:
            param.fill_(float(dist.get_rank() + 7))
        if dist.get_rank() in failing:
            fail()


def wrong() -> None:
    raise KeyError("wrong key")


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("modifier", [0, 1])
@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("init", [False, True])
@distributed(world_size=2)
def test_an_exception_reaches_every_rank(
    init: bool, live: str, modifier: int, failing: tuple[int, ...]
) -> None:
    model = start(init, **LIVE[live])
    params = list(model.parameters())
    before = weights(params)
    for _ in range(2):
        if dist.get_rank() in failing:
            with pytest.raises(KeyError, match="wrong key"):
                spoil(params, modifier, failing, wrong)
        else:
            with pytest.raises(RuntimeError, match=rf"rank {failing[0]} left .* KeyError: 'wrong key'"):
                spoil(params, modifier, failing, wrong)
    assert all(torch.equal(a, b) for a, b in zip(weights(params), before, strict=True))
    spoil(params, modifier, (), wrong)
    assert all((value == modifier + 7).all() for value in weights(params))


@distributed(world_size=2)
def test_training_goes_on_as_if_nothing_had_been() -> None:
    losses = []
    for disturbed in (False, True):
        engine = start()
        for step in range(4):
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
            if disturbed and step == 2:
                with pytest.raises((RuntimeError, SystemExit)):
                    spoil(list(engine.parameters()), 0, (1,), lambda: sys.exit(3))
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    assert losses[:4] == losses[4:]


@distributed(world_size=4)
def test_the_rank_that_failed_is_named() -> None:
    params = list(start(init=True).parameters())

    def reshape() -> None:
        params[0].data = params[0].data[:1]

    with pytest.raises(RuntimeError) as caught:
        spoil(params, 0, (2, 3), reshape)
    own = "a changed shape needs a new parameter"
    expected = own if dist.get_rank() >= 2 else f"rank 2 left the block .* {own}"
    assert caught.match(expected)


@distributed(world_size=2)
def test_an_error_where_nothing_is_kept_stays_on_its_rank() -> None:
    params = list(start().parameters())
    before = weights(params)
    try:
        with deepspeed.zero.GatheredParameters(params):
            if dist.get_rank() == 1:
                wrong()
    except KeyError:
        assert dist.get_rank() == 1
    assert all(torch.equal(a, b) for a, b in zip(weights(params), before, strict=True))


@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("init", [False, True])
@distributed(world_size=2)
def test_replaced_data_is_kept(init: bool, live: str) -> None:
    """`param.data = ...` and `vector_to_parameters` leave parameters that are no views of their bucket."""
    model = start(init, **LIVE[live])
    inputs = torch.ones(2, 6)
    if not init:
        model(inputs)  # so that the buckets may stay gathered
    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        nn.utils.vector_to_parameters(torch.full((sum(p.numel() for p in params),), 0.25), params)
        params[1].data = torch.full_like(params[1], 0.5)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    for param, value in zip(plain.parameters(), (0.25, 0.5, 0.25, 0.25), strict=True):
        nn.init.constant_(param, value)
    found = weights(params)
    assert all(torch.equal(each, param) for each, param in zip(found, plain.parameters(), strict=True))
    engine = (
        deepspeed.initialize(model=model, config={"train_batch_size": 4, "zero_optimization": {"stage": 3}})[
            0
        ]
        if init
        else model
    )
    assert torch.equal(engine(inputs), plain(inputs))
    with deepspeed.zero.GatheredParameters(params):  # dropped
        params[0].data = torch.zeros_like(params[0])
    assert torch.equal(engine(inputs), plain(inputs))
    engine.destroy()


@pytest.mark.parametrize("direct", [False, True], ids=["block", "all_gather"])
@distributed(world_size=2)
def test_a_single_rank_has_used_the_bucket(direct: bool) -> None:
    """After its evaluation the bucket is whole on that rank, so the others would wait for its part in vain."""
    engine = start(stage3_param_persistence_threshold=0)  # so that weight and bias share a bucket
    layer = engine.module[0]
    before = weights(list(layer.parameters()))
    engine.optimizer.parameter_offload.partition_all_parameters()
    engine.eval()
    if dist.get_rank() == 0:
        engine(torch.ones(1, 6))
    for param, value in zip(layer.parameters(), before, strict=True):
        if direct:
            param.all_gather()
            param.all_gather()
            assert torch.equal(param, value)
            param.partition()
        else:
            with deepspeed.zero.GatheredParameters(param), deepspeed.zero.GatheredParameters([param]):
                assert torch.equal(param, value)
    engine.destroy()
    assert torch.equal(layer.weight, before[0])
