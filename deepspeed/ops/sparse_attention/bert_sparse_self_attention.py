"""Block-sparse self-attention for BERT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.ops.sparse_attention.softmax import as_bias
from deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig, SparsityConfig


class BertSparseSelfAttention(nn.Module):
    """Replaces ``BertSelfAttention``, with the same ``query``, ``key`` and ``value``. There is no dropout of attention
    weights.

    Args:
        config: with ``hidden_size`` and ``num_attention_heads``; ``max_position_embeddings``, if present, is the
            length for which the layout is made.
        sparsity_config: the pattern.

    Raises:
        ValueError: the number of heads does not divide the hidden size.
    """

    def __init__(
        self,
        config: Any,
        sparsity_config: SparsityConfig = FixedSparsityConfig(num_heads=4),  # noqa: B008 (the documented default)
    ) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads != 0:
            raise ValueError(
                f"hidden_size={config.hidden_size} is not a multiple of "
                f"num_attention_heads={config.num_attention_heads}"
            )
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        longest = getattr(config, "max_position_embeddings", None) or 2048
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=longest)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """Reshape [batch, tokens, hidden] to [batch, heads, tokens, head size]."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Attend, [batch, tokens, hidden] in and out. ``attention_mask`` is added to the scores of its tokens as keys:
        [batch, tokens], or with dims of size 1 in between."""
        query, key, value = (
            self.transpose_for_scores(projection(hidden_states))
            for projection in (self.query, self.key, self.value)
        )
        context = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return context.transpose(1, 2).flatten(2)


class TransformersBertAttention(BertSparseSelfAttention):
    """The same for models of Transformers: pads to whole blocks, accepts that package's masks, and returns a pair."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Attend. ``attention_mask``: [batch, tokens] (0 masks), [batch, 1, 1, tokens] (bool, or floats that are
        added), or None."""
        length = hidden_states.shape[1]
        missing = -length % self.sparse_self_attention.sparsity_config.block
        if attention_mask is None and missing:
            attention_mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        bias = None if attention_mask is None else _key_bias(attention_mask, hidden_states.dtype)
        if missing:
            assert bias is not None
            hidden_states = nn.functional.pad(hidden_states, (0, 0, 0, missing))
            bias = nn.functional.pad(bias, (0, missing), value=float("-inf"))
        return super().forward(hidden_states, bias)[:, :length], None


def _key_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the term added to the scores of keys, [batch, tokens]."""
    if mask.dim() == 4:
        mask = mask[:, 0, 0]  # bidirectional model: the same for all queries
        if mask.is_floating_point():
            return mask.to(dtype)
    return as_bias(mask, "mul", "attention_mask", dtype)
