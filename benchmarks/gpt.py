"""The GPT that the benchmarks train: plain PyTorch, so that it runs in any environment that has torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 4096


@dataclass(frozen=True)
class GPTSize:
    layers: int
    width: int
    heads: int


SIZES = {
    "tiny": GPTSize(layers=2, width=64, heads=2),  # 0.4M parameters, for trying the scripts
    "10M": GPTSize(layers=5, width=384, heads=6),  # 10.5M
    "50M": GPTSize(layers=9, width=640, heads=10),  # 47.1M
    "350M": GPTSize(layers=24, width=1024, heads=16),  # 306M, for one GPU
}


class Block(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BTC)).unflatten(-1, (3, self.heads, -1))
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        x_BTC = x_BTC + self.projection(attended.transpose(1, 2).flatten(2))
        return x_BTC + self.down(F.gelu(self.up(self.mlp_norm(x_BTC))))


class GPT(nn.Module):
    """Pre-norm GPT with learnt positions and a tied head; ``forward`` returns the mean cross-entropy."""

    def __init__(self, size: GPTSize, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.tokens(tokens_BT) + self.positions(positions)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = F.linear(self.norm(x_BTC), self.tokens.weight)
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def build(size: str, context: int) -> GPT:
    """The model of that size with the same weights on every rank and in every contender."""
    torch.manual_seed(1)
    return GPT(SIZES[size], context)


def random_batches(count: int, batch: int, context: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` pairs (tokens, targets) [batch, context] int64."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, batch, context + 1), generator=generator)
    return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in ids]
