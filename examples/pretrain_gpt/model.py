"""A GPT in plain PyTorch: pre-norm blocks, rotary positions, tied embeddings. It knows nothing about how it
is trained.

Letters in comments: B sequences, T tokens of each, H heads, D features per head, C = H * D, V tokens of the
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes; the defaults make 9.9 million parameters."""

    vocabulary: int = 4096
    context: int = 256
    layers: int = 7
    heads: int = 5
    width: int = 320


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)  # [B, 3H, T, D]
        q, k, v = heads.chunk(3, dim=1)
        y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))  # [B, T, C]


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each applied to the normalised residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Maps token ids to the mean loss in nats per token if targets are given, otherwise to the logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied: a token is read and predicted by the same vector
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):  # whatever is added to the residual stream 2L times starts small
            for layer in (module.attention.out, module.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """``ids``, ``targets``: int64 [B, T]. Returns a scalar, or logits [B, T, V] without targets."""
        x = self.embedding(ids)  # [B, T, C]
        rotation = rotation_table(ids.shape[1], self.config.width // self.config.heads, x)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotation_table(length: int, features: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D/2] of the rotary position embedding (Su et al., 2021), in the dtype of
    ``like``.

    Recomputed each time, in fp32: as a buffer it would be rounded whenever the module is cast to 16 bits.
    """
    frequency = 10000.0 ** -torch.linspace(0, 1, features // 2, device=like.device, dtype=torch.float32)
    angle = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequency)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair of features of ``x`` [B, H, T, D] by an angle that grows with the token's position."""
    cosine, sine = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


@torch.no_grad()
def generate(
    model: nn.Module, ids: Tensor, new_tokens: int, context: int, temperature: float = 0.8
) -> Tensor:
    """Continues ``ids`` [1, T] by sampling; the same seed gives the same text on every rank."""
    generator = torch.Generator(ids.device).manual_seed(0)
    for _ in range(new_tokens):
        logits = model(ids[:, -context:])[:, -1].float() / temperature
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat((ids, token), dim=1)
    return ids
