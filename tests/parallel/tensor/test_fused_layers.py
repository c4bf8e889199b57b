"""Layers of several matrices side by side, and parameters made whole and split again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS
from deepspeed.checkpoint.foreign.splits import DescribedCuts
from deepspeed.checkpoint.placement import Placement, placement_of
from deepspeed.compat.module_inject.layers import (
    LinearAllreduce,
    LinearLayer,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
    collect_autotp_universal_checkpoint_info,
    get_auto_tp_mode,
    is_autotp_training_mode,
    set_autotp_mode,
)
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.mappings import gather_from
from deepspeed.parallel.tensor.planning.autotp_config import AutoTPConfig
from tests.pool import distributed


def whole(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs)


@pytest.mark.parametrize("shape", [(2, -1), ((6, 4, 2), -1), ((7, 3, 2), -1)])
@distributed(world_size=2)
def test_outputs_side_by_side(shape: Any) -> None:
    reference = whole(5, 12)
    layer = SubParamLinearLayer(copy.deepcopy(reference), dist.get_world_group(), shape=shape, name="qkv")
    assert sum(layer.subparam_sizes) == 12 and layer.weight.shape[0] < 12
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    mine, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = gather_from(layer(mine), layer.group, layer.cut.along(-1))
    torch.testing.assert_close(out, reference(expected))
    out.square().sum().backward()
    reference(expected).square().sum().backward()
    torch.testing.assert_close(mine.grad, expected.grad)
    torch.testing.assert_close(layer.weight.grad, layer.cut.take(reference.weight.grad, dist.get_rank()))


@distributed(world_size=2)
def test_inputs_side_by_side() -> None:
    reference = whole(10, 3)
    layer = SubParamLinearAllreduce(copy.deepcopy(reference), dist.get_world_group(), (-1, (6, 4)))
    x = torch.randn(2, 10, generator=torch.Generator().manual_seed(1))
    out = layer(layer.cut.along(-1).take(x, dist.get_rank()))
    torch.testing.assert_close(out, reference(x))


@pytest.mark.parametrize("kind", [LinearLayer, LinearAllreduce, SubParamLinearLayer])
@distributed(world_size=2)
def test_parameters_are_whole_between_gather_and_partition(kind: type) -> None:
    reference = whole(4, 7)
    more = ((4, 3), -1) if kind is SubParamLinearLayer else ()
    layer = kind(copy.deepcopy(reference), dist.get_world_group(), *([more] if more else []))
    own = [param.detach().clone() for param in layer.parameters()]
    layer.gather_params(list(layer.parameters()))
    for param, expected in zip(layer.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param, expected)
    layer._tp_partition(list(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), own, strict=True))


@distributed(world_size=2)
def test_shapes_that_do_not_fit_are_refused() -> None:
    layer = whole(4, 6)
    for shape, dim, words in (
        (((4, 4), -1), 0, "does not match"),
        ((4, -1), 0, "does not match"),
        ((2, -1), 1, "split along dim 0"),
    ):
        with pytest.raises(ValueError, match=words):
            SubParamLinearLayer(layer, None, shape, dim)
    rule = {"patterns": [".*"], "partition_type": "column", "shape": [2, [1, 1]]}
    with pytest.raises(ValueError, match="nested tuple only allowed at partition_dim"):
        AutoTPConfig.from_dict({"layer_specs": [rule]})
    set_autotp_mode(training=True)
    assert is_autotp_training_mode() and get_auto_tp_mode().value == "TRAINING"


@distributed(world_size=2)
def test_two_16_bit_dtypes_conflict() -> None:
    model = deepspeed.tp_model_init(nn.Sequential(whole(4, 4)), tp_size=2, dtype=torch.float16)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    with pytest.raises(ValueError, match="Conflicting dtype"):
        deepspeed.initialize(model=model, config=config)


class Product(nn.Module):
    """Linear, but of no class that anybody knows; ``square`` makes it something else."""

    def __init__(self, transposed: bool, square: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.bias = nn.Parameter(torch.zeros(4))
        self.transposed, self.square = transposed, square

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.transposed else self.weight.t()
        return torch.matmul(x.square() if self.square else x, weight) + self.bias


def start(model: nn.Module, *rules: tuple[str, str]) -> Any:
    specs = [{"patterns": [pattern], "partition_type": kind} for pattern, kind in rules]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        },
    }
    return deepspeed.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("transposed", [False, True])
@distributed(world_size=2)
def test_a_rule_may_name_a_linear_layer_of_any_class(transposed: bool) -> None:
    model = nn.Sequential(Product(transposed), nn.ReLU(), nn.Linear(4, 3))
    reference = copy.deepcopy(model)
    oracle = torch.optim.SGD(reference.parameters(), lr=0.1)
    engine = start(model, (r"0\.weight$", "column"), (r"2\.weight$", "row"))
    assert isinstance(engine.module[0], LinearLayer) and isinstance(engine.module[0], Product)
    x = torch.ones(2, 4)
    for _ in range(2):
        engine.backward(engine(x).square().sum())
        engine.step()
        reference(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        oracle.step()
        oracle.zero_grad()
    torch.testing.assert_close(engine(x), reference(x), rtol=1e-4, atol=1e-5)
    engine.destroy()
    with pytest.raises(RuntimeError, match="is not a linear layer"):
        start(nn.Sequential(Product(transposed, square=True)), (r"0\.weight$", "column"))


@distributed(world_size=2)
def test_rules_may_keep_every_layer_whole() -> None:
    engine = start(nn.Sequential(nn.Linear(4, 4)), (r".*\.?weight$", "skip"))
    assert type(engine.module[0]) is nn.Linear and engine.mesh.size("tp") == 2
    loss = engine(torch.ones(1, 4)).sum()
    engine.backward(loss)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(torch.ones(4, 5).norm().item())
    engine.destroy()


KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "row": (LinearAllreduce, {}),
    "column": (LinearLayer, {}),
    "equal": (SubParamLinearLayer, {"shape": (3, -1)}),
    "stated": (SubParamLinearLayer, {"shape": [[8, 4, 12], -1]}),
    "inputs": (SubParamLinearAllreduce, {"shape": (-1, (4, 8))}),
}


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_what_a_model_says_of_its_layers_joins_their_parts(kind: str) -> None:
    """Read as a checkpoint's ``universal_checkpoint_info``, it gives the boxes that the layers hold."""
    layer_class, arguments = KINDS[kind]
    model = nn.Module()
    model.proj = layer_class(whole(12, 24), dist.get_world_group(), name="proj", **arguments)
    model.norm = nn.LayerNorm(4)
    info = DescribedCuts(collect_autotp_universal_checkpoint_info(model))
    for name, param in model.named_parameters():
        found = info.placements(name, [tuple(param.shape)] * 2)[dist.get_rank()]
        own: Placement = placement_of(param)
        assert found.index(name).local_shape == tuple(param.shape)
        assert (found.global_shape, _boxes(found)) == (own.global_shape, _boxes(own)), name


def _boxes(placement: Placement) -> tuple[Any, ...]:
    return placement.boxes or (tuple((0, size) for size in placement.global_shape),)


def test_a_cut_without_words_is_named_as_such() -> None:
    model = nn.Module()
    layer = LinearLayer(whole(4, 6), cut=Cut(0, 6, (((4, 6), (0, 4)),)))
    model.proj = layer
    info = collect_autotp_universal_checkpoint_info(model)
    assert info[AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS] == [r"^proj\.weight$", r"^proj\.bias$"]
