"""Tiled compute against the plain call: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.parallel.sequence.tiled.functions import (
    AutogradComputeMLP,
    TiledFusedLogitsLoss,
    TiledLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from deepspeed.parallel.sequence.tiled.tiles import tile_lengths
from tests.parallel.sequence.tiled_models import (
    HIDDEN,
    MLP,
    VOCAB,
    assert_close,
    batch,
    compute_mlp,
    model,
    step,
    tiled_by_keywords,
)


@pytest.mark.parametrize("shards", [2, 3, 11, 64])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_loss_and_gradients_are_those_of_the_plain_model(shards: int, dropout: float) -> None:
    inputs = batch()
    expected = step(model(dropout=0.0), *inputs)
    if dropout:  # drawn tile by tile: other masks than without tiles, but the same in both runs
        tiled = model(dropout=dropout).tile(shards)
        first, second = step(tiled, *inputs), step(tiled, *inputs)
        assert_close(first, second, 0.0)
        check_directional(tiled, inputs)
        return
    assert_close(step(model().tile(shards), *inputs), expected)


def check_directional(tiled: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
    """The gradient predicts how the loss changes, with the same random numbers: the backward drew them again."""
    tiled = tiled.double()
    found = step(tiled, *inputs)
    moved = 1e-3
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, param in tiled.named_parameters():
                param += sign * moved * found[name] * (1 if sign == 1 else 2)
        torch.manual_seed(5)
        losses.append(tiled(*inputs).item())
    expected = 2 * moved * sum((found[name] ** 2).sum().item() for name, _ in tiled.named_parameters())
    assert losses[0] - losses[1] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_lengths_that_the_number_of_tiles_does_not_divide(length: int) -> None:
    assert sum(tile_lengths(length, 4)) == length and len(tile_lengths(length, 4)) == min(4, length)
    ids, labels = batch(length)
    labels[1] = 3
    assert_close(step(model().tile(4), ids, labels), step(model(), ids, labels))


@pytest.mark.parametrize("frozen", ["head", "blocks", "all but one", "embed"])
def test_frozen_weights_get_no_gradient(frozen: str) -> None:
    def froze(each: Any) -> Any:
        for name, param in each.named_parameters():
            kept = name == "blocks.0.up.bias" if frozen == "all but one" else not name.startswith(frozen)
            param.requires_grad_(kept)
        return each

    assert_close(step(froze(model()).tile(3), *batch()), step(froze(model()), *batch()))


@pytest.mark.parametrize("form", ["reentrant", "hooks", "ours", "ours with hooks"])
def test_inside_activation_checkpointing(form: str) -> None:
    runs: dict[str, Any] = {
        "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
        "hooks": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "ours": deepspeed.transforms.recompute.checkpointing.checkpoint,
        "ours with hooks": deepspeed.transforms.recompute.checkpointing.non_reentrant_checkpoint,
    }
    tiled = model().tile(3)
    tiled.run = runs[form]
    assert_close(step(tiled, *batch()), step(model(), *batch()))
    dropping = model(dropout=0.4).tile(3)
    expected = step(dropping, *batch())
    dropping.run = runs[form]
    assert_close(step(dropping, *batch()), expected, 1e-6)


def test_bf16_sums_of_tiles_are_rounded_once() -> None:
    inputs = batch(64)
    exact = step(model(), *inputs)
    plain, tiled = step(model().bfloat16(), *inputs), step(model().bfloat16().tile(16), *inputs)
    for name, value in exact.items():
        scale = value.abs().max()
        plain_error, error = ((each[name] - value).abs().max() / scale for each in (plain, tiled))
        assert error <= 1.5 * plain_error + 2e-3, name


def test_autocast_is_the_same_in_the_second_run() -> None:
    def under(each: nn.Module) -> dict[str, Tensor]:
        each.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(*batch())
        loss.backward()
        return {
            "loss": loss.detach(),
            **{n: p.grad for n, p in each.named_parameters() if p.grad is not None},
        }

    assert_close(under(model().tile(3)), under(model()), 2e-2)


def test_without_gradients_each_tile_is_computed_once() -> None:
    tiled = model().tile(3)
    with torch.no_grad():
        loss = tiled(*batch())
    assert not loss.requires_grad and tiled.blocks[0].calls == 3
    torch.testing.assert_close(loss, model()(*batch()).detach())
    step(tiled, *batch())
    assert tiled.blocks[0].calls == 9  # and twice where there are


def test_documented_calls() -> None:
    torch.manual_seed(0)
    mlp = MLP()
    x = torch.randn(2, 7, HIDDEN, requires_grad=True)
    grad = torch.randn(2, 7, HIDDEN)

    def run(function: Any) -> dict[str, Tensor]:
        mlp.zero_grad()
        out = function()
        found = torch.autograd.grad(out, [x, *mlp.parameters()], grad)
        return {"out": out.detach(), **{str(i): each for i, each in enumerate(found)}}

    expected = run(lambda: mlp(x))
    assert_close(run(lambda: TiledMLP.apply(MLP.compute, mlp, x, 3, list(mlp.parameters()))), expected)
    assert_close(run(lambda: tiled_by_keywords(mlp, x, 3)), expected)
    assert_close(run(lambda: AutogradComputeMLP.apply(MLP.compute, mlp, x)), expected)
    flat = run(lambda: TiledMLP.apply(MLP.compute, mlp, x.view(-1, HIDDEN), 3, None).view(2, 7, HIDDEN))
    assert_close(flat, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_all_kinds(reduction: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB)
    x, (_, y) = torch.randn(2, 11, HIDDEN, requires_grad=True), batch()
    y[:, 4:7] = -100  # a tile without a token

    def loss(self: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x).view(-1, VOCAB), y.view(-1), reduction=reduction)

    def of_transformers(logits: Tensor, labels: None, vocab_size: int, shift_labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), shift_labels.view(-1))

    def keywords(x: Tensor, shift_labels: Tensor, head: nn.Linear) -> Tensor:
        return loss(head, x, shift_labels)

    def run(result: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(result, [x, *head.parameters()])
        return {"loss": result.detach(), **{str(i): each for i, each in enumerate(found)}}

    expected = run(loss(head, x, y))
    assert_close(
        run(TiledFusedLogitsLoss.apply(loss, head, x, y, None, 4, [head.weight], reduction)), expected
    )
    sharded, passed = {"x": x, "shift_labels": y}, {"head": head}
    got = sequence_tiled_compute(keywords, 11, 4, sharded, passed, "x", None, 0, reduction)
    assert_close(run(got), expected)
    if reduction == "mean":
        assert_close(run(TiledLoss.apply(of_transformers, head(x), VOCAB, y, 4)), expected)


def test_a_mask_says_which_tokens_count() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    y, mask = torch.randn(2, 9), torch.rand(2, 9) < 0.5

    def loss(_: None, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return ((x.sum(-1) - y).square() * mask).sum() / mask.sum()

    tiled = TiledFusedLogitsLoss.apply(loss, None, x, y, mask, 4, None, "mean")
    expected = loss(None, x, y, mask)
    torch.testing.assert_close(tiled, expected)
    torch.testing.assert_close(torch.autograd.grad(tiled, x), torch.autograd.grad(expected, x))


def test_a_batch_without_labels_is_a_loss_of_zero() -> None:
    each = model().tile(3)
    ids, labels = batch()
    found = step(each, ids, torch.full_like(labels, -100))
    assert all(not value.any() for value in found.values())


def test_tensors_with_a_graph_are_arguments() -> None:
    torch.manual_seed(0)
    mlp, x = MLP(), torch.randn(2, 7, HIDDEN, requires_grad=True)
    scale = torch.rand(HIDDEN, requires_grad=True)

    def compute(x: Tensor, scale: Tensor) -> Tensor:
        return mlp.compute(x) * scale

    got = sequence_tiled_compute(compute, 7, 3, {"x": x}, {"scale": scale * 2}, "x", None, 1, None)
    expected = mlp.compute(x) * (scale * 2)
    ones = torch.ones_like(expected)
    wanted = [x, scale, *mlp.parameters()]
    for a, b in zip(
        torch.autograd.grad(got, wanted, ones), torch.autograd.grad(expected, wanted, ones), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    outside = scale * 2
    with pytest.raises(RuntimeError, match="MulBackward0.*kwargs_to_pass"):
        TiledMLP.apply(lambda _, x: mlp.compute(x) * outside, None, x, 3)


def test_weights_that_changed_before_the_backward() -> None:
    mlp, x = MLP(), torch.randn(2, 7, HIDDEN)
    out = tiled_by_keywords(mlp, x, 2)
    with torch.no_grad():
        mlp.gate.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": 0}, "shards=0"),
        ({"seqlen": 8}, "seqlen=8"),
        ({"output_reduction": "max"}, "output_reduction='max'"),
        ({"output_reduction": "mean"}, r"shape \(2, 4, 12\)"),
        ({"grad_requiring_tensor_key": "y"}, "grad_requiring_tensor_key='y'"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "fn": compute_mlp,
        "seqlen": 7,
        "shards": 2,
        "kwargs_to_shard": {"x": torch.randn(2, 7, HIDDEN)},
        "kwargs_to_pass": {"self": MLP()},
        "grad_requiring_tensor_key": "x",
        "output_reduction": None,
    }
    with pytest.raises(ValueError, match=message):
        sequence_tiled_compute(**(arguments | change))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_loss_is_rounded_once(dtype: torch.dtype) -> None:
    """The share of each tile and the sum are exact: what a tile's own result lacks cannot be regained."""
    y = torch.zeros(1, 64, dtype=torch.long)
    for seed in range(30):
        torch.manual_seed(seed)
        x, tiles = torch.rand(1, 64, 8, dtype=dtype) * 5, 7 + seed
        found = TiledFusedLogitsLoss.apply(lambda _, x, y: x.mean(), None, x, y, None, tiles)
        parts = x.tensor_split(tiles, dim=1)
        exact = sum(part.mean().double() * part.shape[1] / 64 for part in parts)
        assert found.dtype == dtype and found == exact.to(dtype)
