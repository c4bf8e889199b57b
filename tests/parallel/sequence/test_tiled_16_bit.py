"""Tiled losses of 16-bit models, compared with the loss without tiles and with fp32.

Without tiles, a cross-entropy of 16-bit logits gives a loss of 16 bits: torch rounds each token's loss, and its sum. In
bf16 neighbours are 1.6e-2 apart at a loss of 2.3, so nothing but the same bits is within 1e-3 of it. Transformers casts
logits to fp32 first; then losses are fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.parallel.sequence.tiled.functions import (
    TiledFusedLogitsLoss,
    TiledLoss,
    sequence_tiled_compute,
)
from deepspeed.parallel.sequence.tiled.lazy_logits import LazyLogits

BATCH, LENGTH, HIDDEN, VOCAB = 2, 250, 32, 256
TILES = 7
Loss = Callable[..., Tensor]

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def batch(dtype: torch.dtype, seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states and labels. Logits have few bits: the products of all tiles are exact on any machine."""
    torch.manual_seed(seed)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randint(-1, 2, head.weight.shape) / 4)
    x = torch.randint(-2, 3, (BATCH, LENGTH, HIDDEN)).float() / 2
    y = torch.randint(0, VOCAB, (BATCH, LENGTH))
    y[0, :150] = -100  # prompts: two tiles have no token that counts, others have some
    y[1, :80] = -100
    y[:, 5::11] = -100
    return head.to(dtype), x.to(dtype), y


def plain(reduction: str, cast: bool = False, **options: Any) -> Loss:
    def loss(head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        logits = head(x).view(-1, VOCAB)
        logits = logits.float() if cast else logits
        return nn.functional.cross_entropy(logits, y.view(-1), reduction=reduction, **options)

    return loss


def run(loss: Loss, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Loss and gradients of hidden states and weight, the latter of ``scale`` times the loss."""
    head, x, y = batch(dtype)
    x.requires_grad_()
    value = loss(head, x, y)
    gradients = torch.autograd.grad(value, [x, head.weight], torch.tensor(scale, dtype=value.dtype))
    return [value.detach(), *(each.float() / scale for each in gradients)]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def tiled(loss: Loss, reduction: str) -> Loss:
    return lambda head, x, y: TiledFusedLogitsLoss.apply(loss, head, x, y, None, TILES, None, reduction)


def by_keywords(loss: Loss, reduction: str) -> Loss:
    def fn(x: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
        return loss(head, x, labels)

    return lambda head, x, y: sequence_tiled_compute(
        fn, LENGTH, TILES, {"x": x, "labels": y}, {"head": head}, "x", None, 0, reduction
    )


def lazily(loss: Loss, reduction: str) -> Loss:
    """The head of a model with ``tiled_compute``."""

    def call(head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return loss(lambda x: LazyLogits.of(x, head, VOCAB, TILES, x.dtype), x, y)  # type: ignore[arg-type]

    return call


WAYS = {"fused": tiled, "by keywords": by_keywords, "lazy": lazily}


@dtypes
@pytest.mark.parametrize(("reduction", "cast"), [("mean", False), ("mean", True), ("sum", True)])
@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_that_without_tiles(way: str, reduction: str, cast: bool, dtype: torch.dtype) -> None:
    loss = plain(reduction, cast)
    # Gradients of a mean are near the smallest numbers of fp16: the loss is scaled, as in training.
    scale = 1024.0 if dtype == torch.float16 and reduction == "mean" else 1.0
    expected, found = run(loss, dtype, scale), run(WAYS[way](loss, reduction), dtype, scale)
    exact = run(plain(reduction), torch.float32)
    assert found[0].dtype == expected[0].dtype
    assert distance(found[0], expected[0]) <= (2e-7 if cast else 0.0)
    # The weight's gradient is a sum over tiles: each is rounded, and their sum is, by as much.
    for mine, theirs, oracle, times in zip(found[1:], expected[1:], exact[1:], (1.01, 1.5), strict=True):
        assert distance(mine, oracle) <= times * distance(theirs, oracle)


@dtypes
def test_existing_logits(dtype: torch.dtype) -> None:
    head, x, y = batch(dtype)
    logits = head(x).detach().requires_grad_()

    def loss(logits: Tensor, labels: None, vocab_size: int, shift_labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), shift_labels.view(-1))

    found = TiledLoss.apply(loss, logits, VOCAB, y, TILES)
    expected = loss(logits, None, VOCAB, y)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(each, logits)[0] for each in (found, expected)))


def test_a_long_sequence_in_fp16_has_a_loss() -> None:
    """Torch's own sum of 20,000 losses overflows on a CPU, and its mean with it."""
    torch.manual_seed(0)
    logits, y = torch.randn(1, 20_000, 64).half() * 2, torch.randint(0, 64, (1, 20_000))

    def loss(logits: Tensor, labels: None, vocab_size: int, shift_labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), shift_labels.view(-1))

    found = TiledLoss.apply(loss, logits, 64, y, 16)
    torch.testing.assert_close(found.float(), loss(logits.float(), None, 64, y), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["fused", "by keywords"])
@pytest.mark.parametrize(
    "options",
    [{"ignore_index": 7}, {"weight": torch.arange(1, VOCAB + 1) / VOCAB}, {"label_smoothing": 0.1}],
    ids=["ignore_index", "weight", "label_smoothing"],
)
def test_means_count_what_the_function_counts(options: dict[str, Any], way: str, dtype: torch.dtype) -> None:
    """Tiles have different numbers of such tokens, which only the function knows; one has none."""

    def loss(head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        given = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
        y = y.masked_fill(y == -100, given.get("ignore_index", -100))
        return plain("mean", **given)(head, x, y)

    def padded(loss: Loss) -> Loss:
        return lambda head, x, y: loss(
            head, x, y.masked_fill(y == -100, 7) if "ignore_index" in options else y
        )

    expected, found = run(padded(loss), dtype), run(padded(WAYS[way](loss, "mean")), dtype)
    # Torch sums these in 16 bits, in another way: neighbours are at most 2**-7 apart.
    assert distance(found[0], expected[0]) <= (1e-6 if dtype == torch.float32 else 2**-7)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert distance(mine, theirs) <= (1e-5 if dtype == torch.float32 else 1e-2)


@reductions
def test_a_loss_of_something_else_in_some_tile(reduction: str) -> None:
    """As trainers write it for tiles without a token."""

    def loss(head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return plain(reduction)(head, x, y) if (y != -100).any() else head(x).sum().float() * 0.0

    expected = run(plain(reduction), torch.bfloat16)
    found = run(tiled(loss, reduction), torch.bfloat16)
    assert torch.equal(found[0], expected[0])
    assert distance(found[1], expected[1]) <= 1e-6


def test_what_is_made_of_a_cross_entropy_is_a_loss_of_the_tile() -> None:
    def loss(head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return plain("mean", cast=True)(head, x, y) * 3 + head(x).float().square().mean() * 0.0

    expected, found = run(loss, torch.bfloat16), run(tiled(loss, "mean"), torch.bfloat16)
    assert distance(found[0], expected[0]) <= 1e-6


@pytest.mark.slow  # imports the compiler
def test_a_compiled_loss() -> None:
    def loss(head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return torch.compile(plain("mean"), backend="eager")(head, x, y)

    found, expected = run(tiled(loss, "mean"), torch.float32), run(plain("mean"), torch.float32)
    assert distance(found[0], expected[0]) <= 1e-6
