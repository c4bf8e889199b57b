"""A GPT in plain PyTorch, as users write them, without any checkpointing code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(x).chunk(3, -1)
        query, key, value = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(rows, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(
        self, depth: int = 6, width: int = 32, heads: int = 4, vocabulary: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def gpt(seed: int = 0, **options: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(**options)


def tokens(seed: int = 5, rows: int = 4, length: int = 32) -> Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))
