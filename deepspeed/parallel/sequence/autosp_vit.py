"""Attention of a vision encoder with patches sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.sequence.exchange import gather_lengths, join_shards


class UlyssesSPViTAttention(nn.Module):
    """Wraps an attention module: hidden states [batch, own patches, size] -> the same shape.

    Gathers the shards of patches, which may have different lengths, runs ``attn`` on all patches and keeps this rank's:
    images have few patches, and any attention module can be wrapped.

    Args:
        attn: called with the hidden states of all patches and the keyword arguments; returns a tensor of that shape, or
            a tuple that begins with one.
        process_group: the ranks that share the patches, in their order.
        has_cls_token: whether the first position is a class token, replicated on every rank.
    """

    def __init__(self, attn: nn.Module, process_group: Any, has_cls_token: bool = True) -> None:
        super().__init__()
        self.attn = attn
        self.process_group = process_group
        self.has_cls_token = has_cls_token

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        comm = communicator_of(self.process_group)
        kept = 1 if self.has_cls_token else 0
        token, patches = hidden_states[:, :kept], hidden_states[:, kept:]
        lengths = gather_lengths(patches.shape[1], comm, patches.device)
        whole = join_shards(patches, comm, dim=1, lengths=lengths)
        result = self.attn(torch.cat((token, whole), dim=1), **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        start = kept + sum(lengths[: comm.rank])
        own = torch.cat((out[:, :kept], out[:, start : start + lengths[comm.rank]]), dim=1)
        return (own, *result[1:]) if isinstance(result, tuple) else own
