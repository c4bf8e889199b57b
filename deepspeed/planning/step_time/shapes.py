"""Models given by shape (a GPT without weights to download, built on the meta device in milliseconds), or by function
(`module:function`)."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed.planning.activations import TransformerShape

PREFIX = "gpt:"
CONTEXT = 4096
PRESETS = {
    "10m": "5x384x6x4096",
    "50m": "9x640x10x4096",
    "125m": "12x768x12x50257",
    "1.3b": "24x2048x16x50257",
    "7b": "32x4096x32x50257",
    "13b": "40x5120x40x50257",
    "30b": "48x7168x56x50257",
    "70b": "80x8192x64x128256x28672x8",
}
EXPECTED = (
    f"gpt:LAYERSxWIDTHxHEADS[xVOCABULARY[xMLP[xKV_HEADS]]], such as gpt:12x768x12, or one of "
    f"{', '.join(PREFIX + name for name in PRESETS)}"
)


class ShapedConfig:
    """A model config with Transformers' attribute names, so that code for those configs can read it."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int = 50257, mlp: int = 0, kv_heads: int = 0
    ) -> None:
        self.num_hidden_layers, self.hidden_size, self.num_attention_heads = layers, width, heads
        self.num_key_value_heads = kv_heads or heads
        self.vocab_size = vocabulary
        self.intermediate_size = mlp or 4 * width
        self.gated = bool(mlp)
        self.hidden_act = "silu" if mlp else "gelu"


class Attention(nn.Module):
    def __init__(self, config: ShapedConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head = config.hidden_size // self.heads
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        parts = self.qkv(x_BTC).unflatten(-1, (-1, self.head)).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        shared = self.heads // self.kv_heads
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ShapedConfig) -> None:
        super().__init__()
        width, wide = config.hidden_size, config.intermediate_size
        self.gate = nn.Linear(width, wide, bias=False) if config.gated else None
        self.up = nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        up = self.up(x_BTC)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x_BTC)) * up)


class BlockShape(nn.Module):
    def __init__(self, config: ShapedConfig) -> None:
        super().__init__()
        # In execution order: plans take registration order for it.
        self.attention_norm, self.attention = nn.LayerNorm(config.hidden_size), Attention(config)
        self.mlp_norm, self.mlp = nn.LayerNorm(config.hidden_size), MLP(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class ShapedGPT(nn.Module):
    """Pre-norm blocks without positional embeddings (their cost is negligible), an untied head, mean cross-entropy."""

    def __init__(self, config: ShapedConfig) -> None:
        super().__init__()
        self.config = config
        table = torch.empty(config.vocab_size, config.hidden_size)
        if not table.is_meta:  # on the meta device, a normal_ without effect would take seconds
            nn.init.normal_(table)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.blocks = nn.ModuleList(BlockShape(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTC = self.tokens(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.head(self.norm(x_BTC))
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def is_shape(name: str) -> bool:
    return name.lower().startswith(PREFIX)


def build_shape(name: str) -> ShapedGPT:
    """Build the model ``name`` on the current default device. ValueError: the name is malformed."""
    text = name[len(PREFIX) :].lower()
    numbers = PRESETS.get(text, text).split("x")
    if not 3 <= len(numbers) <= 6 or not all(re.fullmatch(r"[1-9]\d*", number) for number in numbers):
        raise ValueError(f"{name}: expected {EXPECTED}")
    config = ShapedConfig(*map(int, numbers))
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if config.hidden_size % heads or heads % kv_heads:
        raise ValueError(
            f"{name}: {heads} heads do not divide the width {config.hidden_size}, or {kv_heads} key-value "
            f"heads do not divide {heads}"
        )
    return ShapedGPT(config)


def random_batch(
    vocabulary: int, batch: int, sequence: int, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets, each [batch, sequence] int64; targets are shifted by one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (batch, sequence + 1), generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def shape_flops(shape: TransformerShape, tokens: int) -> float:
    """Return the FLOPs of a forward by a closed formula: two per matrix weight and token, without attention scores."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gates = 3 if shape.mlp_tensors == 4 else 2
    layer = shape.hidden * (2 * queries + 2 * keys) + gates * shape.hidden * shape.intermediate
    return 2.0 * tokens * (shape.layers * layer + shape.vocabulary * shape.hidden)


class NoSuchFunction(ValueError):
    """The named function cannot be imported."""


def call_of(name: str) -> Callable[[], Any]:
    """Import the function `module:function`, with the current folder on ``sys.path``. NoSuchFunction: there is none."""
    module_name, found, function = name.partition(":")
    if not found:
        raise NoSuchFunction(f"{name!r}: expected module:function")
    sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
        for part in function.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise NoSuchFunction(f"{name}: {error}") from error
    finally:
        sys.path.pop(0)
    return value


def loss_of(model: Callable[..., Any], batch: Any) -> Tensor:
    """Return the model's loss of a batch: a dict of keyword arguments, or a tuple of positional ones. The model returns
    the loss, an object with a ``loss``, or a tuple that begins with it. ValueError: it returns none of these."""
    result = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = getattr(result, "loss", None)
    if loss is None:
        loss = result[0] if isinstance(result, tuple) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"the model returned {type(result).__name__}: a calibration needs the loss, or an output with .loss"
        )
    return loss
