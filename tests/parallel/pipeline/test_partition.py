"""Layers on stages, and messages between them, without processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.encoding import Outline, describe
from deepspeed.parallel.pipeline.module import LayerSpec, TiedLayerSpec
from deepspeed.parallel.pipeline.partition import measure_layers, partition, stage_of
from deepspeed.parallel.pipeline.specs import trained_numel

LAYERS = [
    LayerSpec(nn.Embedding, 100, 8),
    *[LayerSpec(nn.Linear, 8, 8, bias=False) for _ in range(6)],
    torch.tanh,
    nn.LayerNorm(8),
]


def test_methods() -> None:
    assert partition(LAYERS, 3, "uniform") == [0, 3, 6, 9]
    assert partition(LAYERS, 2, "parameters") == [0, 1, 9]  # 800 against 400
    assert partition(LAYERS, 3, "TYPE:linear") == partition(LAYERS, 3, "type:Linear")
    bounds = partition(LAYERS, 3, "type:linear")
    assert [sum(1 <= i <= 6 for i in range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)] == [
        2,
        2,
        2,
    ]
    assert partition(LAYERS, 2, "profile", [1, 1, 1, 1, 1, 1, 1, 1, 8]) == [0, 8, 9]
    assert [stage_of([0, 2, 5], layer) for layer in range(5)] == [0, 0, 1, 1, 1]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="9 layers cannot be spread over 10 stages"):
        partition(LAYERS, 10, "uniform")
    with pytest.raises(
        ValueError, match=r"matches no layer; their types are Embedding, LayerNorm, Linear, tanh"
    ):
        partition(LAYERS, 2, "type:conv")
    with pytest.raises(ValueError, match="must be 'uniform'"):
        partition(LAYERS, 2, "best")
    with pytest.raises(ValueError, match="profile_input"):
        partition(LAYERS, 2, "profile")
    with pytest.raises(RuntimeError, match=r"subclass of torch\.nn\.Module"):
        LayerSpec(torch.tanh)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="layer 5 is outside"):
        stage_of([0, 2, 5], 5)


def test_counting_allocates_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    assert trained_numel(LayerSpec(nn.Linear, 1_000_000, 1_000_000)) == 10**12 + 10**6  # 4 TB
    assert torch.equal(torch.get_rng_state(), before)
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    assert trained_numel(frozen) == 3 and trained_numel(torch.tanh) == 0


def test_specs_build() -> None:
    tied = TiedLayerSpec("embed", nn.Embedding, 10, 4, forward_fn=lambda m, x: x @ m.weight.T)
    assert tied.tied_weight_attr == ["weight"] and repr(tied) == "Embedding(10, 4)"
    assert TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="bias").tied_weight_attr == ["bias"]
    assert isinstance(tied.build(log=True), nn.Embedding)


def test_measured_times() -> None:
    layers = [LayerSpec(nn.Linear, 8, 512), torch.tanh, LayerSpec(nn.Linear, 512, 8)]
    times = measure_layers(layers, torch.randn(2, 8))
    assert len(times) == 3 and min(times) > 0


def test_messages_keep_everything() -> None:
    value = {
        "hidden": torch.randn(2, 3, requires_grad=True),
        "mask": torch.tensor([True, False, True]),
        "rest": (None, True, -5, 2.5, "text", [torch.arange(4), torch.tensor(1.5, dtype=torch.bfloat16)]),
        "empty": torch.empty(0, 3),
        "last": torch.randn(5, 2).T,
    }
    marks, tensors = describe(value)
    sent = Outline.of(value, tensors)
    packed = sent.pack(tensors)
    assert packed.numel() == sent.nbytes
    back = Outline.of_words(sent.words()).unpack(packed)
    assert list(back) == list(value) and back["rest"][:5] == value["rest"][:5]
    assert torch.equal(back["hidden"], value["hidden"]) and back["hidden"].requires_grad
    assert torch.equal(back["mask"], value["mask"]) and back["empty"].shape == (0, 3)
    assert torch.equal(back["rest"][5][0], torch.arange(4)) and back["rest"][5][1].dtype is torch.bfloat16
    assert torch.equal(back["last"], value["last"]) and back["hidden"].is_leaf
    back["mask"].logical_not_()  # one tensor's versions are not another's
    assert back["hidden"]._version == 0
    assert describe(value)[0] == marks


def test_values_that_compare_as_equal_are_told_apart() -> None:
    alike = [True, 1, 1.0, "1", (1,), [1], {"1": 1}, 0.0, -0.0, None]
    marks = [describe(value)[0] for value in alike]
    assert all(one != two for i, one in enumerate(marks) for two in marks[:i])
    assert describe({"a": 1, "b": 2})[0] != describe({"b": 2, "a": 1})[0]


def test_what_cannot_be_sent() -> None:
    with pytest.raises(PipelineError, match="returned set"):
        describe(({1},))
    with pytest.raises(PipelineError, match="sparse"):
        describe(torch.eye(2).to_sparse())
