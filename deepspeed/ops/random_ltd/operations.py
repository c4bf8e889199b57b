"""The op ``random_ltd``: single operations on the tokens that a layer works on, beside what has gradients
(``dropping_utils``). On any device and in any dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.random_ltd.dropping_utils import (
    GatherTokens,
    ScatterTokens,
    bert_sample_tokens,
    gpt_sample_tokens,
    rows_of,
    square_at,
)

__all__ = [
    "GatherTokens",
    "ScatterTokens",
    "bert_sample_tokens",
    "gpt_sample_tokens",
    "mask_gather_bert",
    "mask_gather_gpt",
    "token_gather",
    "token_scatter_",
    "token_sort_",
]


def token_sort_(unsorted_token_ids: Tensor, original_tokens: int) -> Tensor:
    """``unsorted_token_ids`` [..., kept] of sequences of ``original_tokens``, each row sorted in place; itself."""
    return unsorted_token_ids.copy_(unsorted_token_ids.sort(-1).values)


def token_gather(activations: Tensor, sorted_indices: Tensor, batch_first: bool) -> Tensor:
    """The tokens at ``sorted_indices`` [batch, kept] of activations [batch, tokens, hidden], or [tokens, batch, hidden]
    unless ``batch_first``."""
    rows = rows_of(sorted_indices, activations.shape[1 if batch_first else 0], batch_first)
    batch, kept = sorted_indices.shape
    shape = (batch, kept, -1) if batch_first else (kept, batch, -1)
    return activations.flatten(0, 1).index_select(0, rows).view(shape)


@torch.no_grad()
def token_scatter_(
    all_activations: Tensor, layer_activations: Tensor, sorted_indices: Tensor, batch_first: bool
) -> Tensor:
    """``layer_activations`` written over the tokens at ``sorted_indices`` of ``all_activations``, which is returned;
    shapes as for ``token_gather``."""
    dim = 1 if batch_first else 0
    places = sorted_indices.to(torch.int64) if batch_first else sorted_indices.to(torch.int64).t()
    source = layer_activations.to(all_activations.dtype)
    return all_activations.scatter_(dim, places.unsqueeze(-1).expand_as(source), source)


def mask_gather_bert(dense_mask: Tensor, sorted_indices: Tensor) -> Tensor:
    """[layers, batch, 1, kept, kept]: ``dense_mask`` [batch, 1, tokens, tokens] of the tokens at ``sorted_indices``
    [layers, batch, kept]."""
    return torch.stack([square_at(dense_mask, layer.to(torch.int64)) for layer in sorted_indices])


def mask_gather_gpt(dense_mask: Tensor, truncated_seq_len: int) -> Tensor:
    """[batch, 1, kept, kept]: the causal ``dense_mask`` [batch, 1, tokens, tokens] of any ``truncated_seq_len``
    tokens."""
    return dense_mask[:, :, :truncated_seq_len, :truncated_seq_len].contiguous()
