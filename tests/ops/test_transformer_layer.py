"""The training layer against the same layer in plain PyTorch, with gradients in fp64; what it keeps for backward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from deepspeed.ops.transformer.transformer import DroppedWeights
from tests.pool import distributed

BATCH, TOKENS, HIDDEN, INNER, HEADS = 2, 12, 16, 40, 4
OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint", "stochastic_mode")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def config(**options: Any) -> DeepSpeedTransformerConfig:
    known = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "heads": HEADS,
        "attn_dropout_ratio": 0.0,
        "hidden_dropout_ratio": 0.0,
        "num_hidden_layers": 2,
        "initializer_range": 0.3,
    }
    return DeepSpeedTransformerConfig(**{**known, **options})


def layer(**options: Any) -> DeepSpeedTransformerLayer:
    made = DeepSpeedTransformerLayer(config(**options)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def plain(p: dict[str, Tensor], x: Tensor, mask: Tensor, pre: bool) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (HIDDEN,), p[f"{name}_w"], p[f"{name}_b"], 1e-12)

    def attention(x: Tensor) -> Tensor:
        parts = []
        for weight, bias in zip(p["attn_qkvw"].chunk(3), p["attn_qkvb"].chunk(3), strict=True):
            parts.append((x @ weight.T + bias).view(BATCH, TOKENS, HEADS, -1).transpose(1, 2))
        q, k, v = parts
        weights = torch.softmax(q @ k.mT / math.sqrt(HIDDEN // HEADS) + mask, -1)
        return (weights @ v).transpose(1, 2).reshape(x.shape) @ p["attn_ow"].T + p["attn_ob"]

    def feed_forward(x: Tensor) -> Tensor:
        inner = x @ p["inter_w"].T + p["inter_b"]
        return (inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))) @ p["output_w"].T + p["output_b"]

    p = {**p, "attn_n_w": p["attn_nw"], "attn_n_b": p["attn_nb"]}
    if pre:
        x = x + attention(norm(x, "norm"))
        return x + feed_forward(norm(x, "attn_n"))
    x = norm(x + attention(x), "attn_n")
    return norm(x + feed_forward(x), "norm")


@pytest.mark.parametrize("option", [None, *OPTIONS])
@pytest.mark.parametrize("pre", [True, False])
def test_it_is_the_layer_of_bert(pre: bool, option: str | None) -> None:
    made = layer(pre_layer_norm=pre, **({option: True} if option else {}))
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.float64)
    mask[1, ..., 9:] = -10000.0
    parameters = dict(made.named_parameters())
    expected = plain(parameters, x, mask, pre)
    grad = torch.randn_like(expected)
    of = [x, *parameters.values()]
    wanted = torch.autograd.grad(expected, of, grad)
    for given in (mask, mask == 0, (mask == 0)[:, 0, 0].long()):
        found = made(x, given)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        for one, other in zip(torch.autograd.grad(found, of, grad), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def kept(made: DeepSpeedTransformerLayer, x: Tensor) -> int:
    """Elements saved for backward, excluding the parameters and what the next layer saves anyway."""
    own = {p.untyped_storage().data_ptr() for p in made.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.is_floating_point():
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = made(x, None)
    found.pop(out.untyped_storage().data_ptr(), None)
    count = sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in found.values())
    out.sum().backward()
    return count


@pytest.mark.parametrize("pre", [True, False])
def test_options_save_what_they_say(pre: bool) -> None:
    dropout = {"attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1}
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)

    def with_options(**options: bool) -> int:
        return kept(layer(pre_layer_norm=pre, **dropout, **options), x)

    usual, tokens = with_options(), BATCH * TOKENS
    assert usual - with_options(gelu_checkpoint=True) == tokens * INNER
    # And as much for a copy of the values, which a separate product would save.
    scores = BATCH * HEADS * TOKENS * TOKENS
    assert usual - with_options(attn_dropout_checkpoint=True) == scores + tokens * HIDDEN
    # the means of both norms (one number per token) go as well
    saved = usual - with_options(normalize_invertible=True)
    assert saved == 2 * tokens * HIDDEN + 2 * tokens


def test_dropout_is_the_same_whether_computed_again_or_kept() -> None:
    results = []
    for option in (False, True):
        torch.manual_seed(3)
        made = layer(attn_dropout_ratio=0.3, hidden_dropout_ratio=0.2, attn_dropout_checkpoint=option)
        x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
        out = made(x, None)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *made.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    made.eval()
    assert torch.equal(made(x, None), made(x, None))


def test_dropped_weights_have_the_right_gradient() -> None:
    weights, value = (torch.rand(2, 3, 5, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attend(weights: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(1)
        return DroppedWeights.apply(weights, value, 0.4)

    assert torch.autograd.gradcheck(attend, (weights, value))


def test_given_weights_are_taken_and_given_back() -> None:
    sizes = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN,), (INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN,)]
    weights = [torch.randn(size) for size in sizes]
    biases = [torch.randn(size[0]) for size in sizes]
    made = DeepSpeedTransformerLayer(config(), weights, biases)
    for given, back in zip((weights, biases), made.parts(), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(given, back, strict=True))
    assert torch.equal(made.attn_qkvw, torch.cat(weights[:3]))
    assert torch.equal(made.attn_qkvb, torch.cat(biases[:3]))
    assert torch.equal(made.norm_b, biases[7]) and torch.equal(made.attn_nw, weights[4])
    with pytest.raises(ValueError, match="8 weights"):
        DeepSpeedTransformerLayer(config(), weights[:5], biases)


def test_new_weights() -> None:
    made = DeepSpeedTransformerLayer(config(hidden_size=256, intermediate_size=-1, initializer_range=0.02))
    assert made.inter_w.shape == (1024, 256)
    assert made.inter_w.std().item() == pytest.approx(0.02, rel=0.05)
    assert made.output_w.std().item() == pytest.approx(0.01, rel=0.05)
    assert (made.norm_w == 1).all() and not made.attn_qkvb.any()


def test_configs(tmp_path: Path) -> None:
    values = {"hidden_size": 32, "heads": 4, "pre_layer_norm": False}
    made = DeepSpeedTransformerConfig.from_dict(values)
    assert (made.hidden_size, made.heads, made.pre_layer_norm) == (32, 4, False)
    assert (made.intermediate_size, made.layer_norm_eps) == (128, 1e-12)
    (tmp_path / "layer.json").write_text(json.dumps({**values, "intermediate_size": -1}))
    assert vars(DeepSpeedTransformerConfig.from_json_file(str(tmp_path / "layer.json"))) == vars(made)
    first = config(return_tuple=True, max_seq_length=128)
    early = DeepSpeedTransformerLayer(3, first)  # as scripts of early releases do
    assert early.config.layer_id == 3 and isinstance(early(torch.randn(1, 4, HIDDEN), None), tuple)


def test_what_it_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="heads=3"):
        DeepSpeedTransformerLayer(config(heads=3))
    with pytest.raises(ValueError, match="encoder_hidden_states must be None"):
        layer()(torch.zeros(1, 4, HIDDEN), None, encoder_hidden_states=torch.zeros(1))


@distributed(world_size=1)
def test_it_trains_in_an_engine() -> None:
    model = nn.Sequential(*(DeepSpeedTransformerLayer(config(gelu_checkpoint=True)) for _ in range(2)))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
        },
    )
    x = torch.randn(2, TOKENS, HIDDEN)
    losses = []
    for _ in range(4):
        loss = (engine(x).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
