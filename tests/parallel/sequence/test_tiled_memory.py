"""The memory that tiles take: what lies inside exists for one tile, what lies around once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepspeed.parallel.sequence.tiled.functions import TiledFusedLogitsLoss, TiledMLP
from tests.allocations import counted

LENGTH, HIDDEN, WIDE, VOCAB = 1024, 16, 256, 1000
X = LENGTH * HIDDEN * 4


def mlp(self: nn.ModuleList, x: Tensor) -> Tensor:
    return self[1](nn.functional.silu(self[0](x)))


def head(self: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(self(x).view(-1, VOCAB), y.view(-1))


def peak(shards: int, *, of_head: bool) -> int:
    layers = nn.ModuleList([nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)])
    last = nn.Linear(HIDDEN, VOCAB)
    x, y = torch.randn(1, LENGTH, HIDDEN, requires_grad=True), torch.randint(VOCAB, (1, LENGTH))
    for each in (*layers.parameters(), *last.parameters()):
        each.grad = torch.zeros_like(each)
    with counted() as found:
        if of_head:
            result = TiledFusedLogitsLoss.apply(head, last, x, y, None, shards, None, "mean")
        else:
            result = TiledMLP.apply(mlp, layers, x, shards).sum()
        result.backward()
    return found.peak


@pytest.mark.parametrize("of_head", [False, True], ids=["MLP", "head"])
def test_what_lies_inside_exists_for_one_tile(of_head: bool) -> None:
    width = VOCAB if of_head else WIDE
    weights = 4 * (HIDDEN + 1) * VOCAB if of_head else 4 * 2 * (HIDDEN + 1) * WIDE
    inside = LENGTH * width * 4
    whole, tiled = peak(1, of_head=of_head), peak(32, of_head=of_head)
    assert whole > 2 * inside
    # Per tile at most four tensors of the width; around it the output, its gradient and that of the input; the sums of
    # the weights' gradients and a term of them.
    assert tiled < 4 * inside / 32 + 3.5 * X + 2.5 * weights
    assert tiled < whole / 6
