"""Small modules with what makes checkpointing hard: dropout, masks, several results, nesting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
Checkpoint = Callable[..., Any]


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The oracle: no checkpointing."""
    return function(*args, **kwargs)


class Block(nn.Module):
    """[batch, WIDTH] -> the same, with dropout."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        h = self.down(torch.relu(self.up(self.norm(x))))
        if mask is not None:
            h = h * mask
        return x + scale * self.dropout(h)


class Stack(nn.Module):
    """Blocks, each behind ``run``."""

    def __init__(self, depth: int = 3, dropout: float = 0.3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))

    def forward(self, x: Tensor, run: Checkpoint, mask: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = run(block, h, mask, scale=0.5)
        return h.square().mean()


def batch(rows: int = 5, seed: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def stack(seed: int = 0, **options: Any) -> Stack:
    torch.manual_seed(seed)
    return Stack(**options)


def gradients(model: nn.Module, run: Checkpoint, seed: int = 11, **inputs: Any) -> dict[str, Tensor]:
    """Loss and all gradients of one step whose dropout starts at ``seed``."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(batch(), run, **inputs)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found, "next draw": torch.rand(3)}


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different, f"not bit for bit: {different}"
