"""Tiled linear layers against ``torch.nn.Linear``, alone and under stage 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.transforms.tiled_linear import split_tensor_along_last_dim
from deepspeed.zero import TiledLinear, TiledLinearReturnBias
from tests.pool import distributed
from tests.zero.models import config_for

IN, OUT = 11, 7


class LinearReturningBias(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


def tile_grads(tiled: TiledLinear) -> Tensor:
    return torch.cat([torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out_splits", [1, 2, 3, 7])
@pytest.mark.parametrize("in_splits", [1, 2, 5, 11])
def test_equals_the_whole_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    whole = nn.Linear(IN, OUT, bias=bias)
    tiled = TiledLinear(IN, OUT, bias, in_splits, out_splits, init_linear=whole)
    x = torch.randn(2, 3, IN, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = tiled(x), whole(y)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(2, 3, OUT)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(tile_grads(tiled), whole.weight.grad)
    if bias:
        torch.testing.assert_close(torch.cat([row[-1].bias.grad for row in tiled.linears]), whole.bias.grad)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (5, 2), (11, 7)])
def test_parts_say_what_of_the_whole_layer_a_tile_holds(in_splits: int, out_splits: int) -> None:
    whole = nn.Linear(IN, OUT)
    tiled = TiledLinear(IN, OUT, True, in_splits, out_splits, init_linear=whole)
    assert len(tiled.in_parts) == in_splits + 1 and len(tiled.out_parts) == out_splits + 1
    for i, row in enumerate(tiled.linears):
        rows = slice(*tiled.out_parts[i : i + 2])
        for j, tile in enumerate(row):
            assert torch.equal(tile.weight, whole.weight[rows, slice(*tiled.in_parts[j : j + 2])])
        assert torch.equal(row[-1].bias, whole.bias[rows])


@pytest.mark.parametrize("in_splits", [1, 3])
@pytest.mark.parametrize("out_splits", [1, 2])
def test_split_inputs_and_outputs(in_splits: int, out_splits: int) -> None:
    whole = nn.Linear(IN, OUT)
    tiled = TiledLinear(
        IN,
        OUT,
        True,
        in_splits,
        out_splits,
        input_is_already_split=True,
        combine_out_splits=False,
        init_linear=whole,
    )
    x = torch.randn(4, IN)
    parts = tiled(split_tensor_along_last_dim(x, tiled.in_sizes, contiguous_split_chunks=True))
    assert len(parts) == out_splits
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole(x))
    with pytest.raises(ValueError, match="input_is_already_split"):
        tiled([x] * (in_splits + 1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [(1, 1), (3, 2), (1, 7)])
def test_return_bias(splits: tuple[int, int], bias: bool) -> None:
    whole = LinearReturningBias(IN, OUT, bias=bias)
    tiled = TiledLinearReturnBias(IN, OUT, bias, *splits, linear_cls=LinearReturningBias, init_linear=whole)
    x = torch.randn(4, IN)
    (out, out_bias), (expected, expected_bias) = tiled(x), whole(x)
    torch.testing.assert_close(out, expected)
    if bias:
        torch.testing.assert_close(out_bias, expected_bias)
    else:
        assert out_bias is None


def test_refusals() -> None:
    with pytest.raises(ValueError, match="in_splits=0"):
        TiledLinear(IN, OUT, in_splits=0)
    with pytest.raises(ValueError, match="out_splits=8 must lie between 1 and out_features=7"):
        TiledLinear(IN, OUT, out_splits=8)
    with pytest.raises(ValueError, match="does not fit"):
        TiledLinear(IN, OUT, init_linear=nn.Linear(OUT, IN))
    with pytest.raises(ValueError, match="has no bias"):
        TiledLinear(IN, OUT, init_linear=nn.Linear(IN, OUT, bias=False))
    with pytest.raises(ValueError, match="in_features=11"):
        TiledLinear(IN, OUT, in_splits=2)(torch.randn(3, 12))


def test_arguments_reach_the_tiles() -> None:
    tiled = TiledLinear(IN, OUT, in_splits=2, out_splits=2, dtype=torch.float64)
    assert {p.dtype for p in tiled.parameters()} == {torch.float64}


@pytest.mark.parametrize("init", [True, False])
@distributed(world_size=2)
def test_stage_3_trains_it_like_stage_0(init: bool) -> None:
    def train(stage: int) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        with deepspeed.zero.Init(enabled=init and stage == 3):
            head = nn.Linear(16, 20)
            with deepspeed.zero.GatheredParameters(list(head.parameters()), modifier_rank=0), torch.no_grad():
                head.weight.copy_(torch.arange(320.0).view(20, 16).sin() / 4)
                head.bias.fill_(0.1)
            tiled = TiledLinear(16, 20, in_splits=2, out_splits=4, init_linear=head)
        small = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0} if stage else {}
        model = nn.Sequential(tiled)
        engine, *_ = deepspeed.initialize(model=model, config=config_for(stage, **small))
        losses, live = [], []
        if stage:
            sharded = engine.sharded
            for tile in [tile for row in tiled.linears for tile in row]:
                tile.register_forward_hook(lambda *_: live.append(sharded.transitions.live()))
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step + 10 * engine.global_rank))
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if stage:  # one row of tiles at a time, not the whole weight
            assert max(live) == 128, live  # 5 x 16 weights and 5 biases, aligned
        engine.destroy()
        return losses, {k: v.clone() for k, v in model.state_dict().items()}

    losses, weights = train(3)
    expected_losses, expected = train(0)
    assert losses == expected_losses
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected[name])
