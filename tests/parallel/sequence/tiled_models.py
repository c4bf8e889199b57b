"""Small modules for tiled compute, and the untiled oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.parallel.sequence.tiled.functions import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute

HIDDEN, VOCAB = 12, 37


class MLP(nn.Module):
    """[batch, sequence, HIDDEN] -> the same."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0
        self.shards = 1

    def compute(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x) if self.shards == 1 else TiledMLP.apply(MLP.compute, self, x, self.shards, [])


class Model(nn.Module):
    """Tokens and shifted labels [batch, sequence] -> the mean loss of tokens that are not ignored."""

    def __init__(self, dropout: float = 0.0, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(MLP(dropout) for _ in range(depth))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.shards = 1
        self.run: Callable[..., Any] = lambda block, x: block(x)

    def tile(self, shards: int) -> Model:
        self.shards = shards
        for block in self.blocks:
            block.shards = shards
        return self

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x).float().view(-1, VOCAB), y.view(-1))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.run(block, x)
        if self.shards == 1:
            return self.loss(x, labels)
        return TiledFusedLogitsLoss.apply(Model.loss, self, x, labels, None, self.shards, [], "mean")


def model(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def batch(length: int = 11, rows: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and labels; some labels are ignored, all those of the first row's end among them."""
    draw = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(VOCAB, (2, rows, length), generator=draw).unbind()
    labels = labels.masked_fill(torch.rand(labels.shape, generator=draw) < 0.2, -100)
    labels[0, length // 2 :] = -100
    return ids, labels


def step(each: nn.Module, *inputs: Tensor, seed: int = 5) -> dict[str, Tensor]:
    """Loss and gradients; the dropout starts at ``seed``."""
    each.zero_grad()
    torch.manual_seed(seed)
    loss = each(*inputs)
    loss.backward()
    found = {name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Relative to the largest element."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)
        assert error <= tolerance, f"{name}: {error:.1e}"


def compute_mlp(x: Tensor, self: MLP) -> Tensor:
    """In the form that ``sequence_tiled_compute`` is documented with."""
    return self.compute(x)


def tiled_by_keywords(mlp: MLP, x: Tensor, shards: int) -> Tensor:
    return sequence_tiled_compute(
        compute_mlp,
        x.shape[1],
        shards,
        {"x": x},
        {"self": mlp},
        "x",
        list(mlp.parameters()),
        output_unshard_dimension=1,
        output_reduction=None,
    )
