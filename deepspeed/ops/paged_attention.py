"""Host kernel for attention over a paged cache; ``deepspeed.inference.model.attention`` is the reference in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.ops.host_graph import GraphPagedLayer, PagedPiece
from deepspeed.ops.native import DTYPE_CODES, address, library


class PagedPieces:
    """The sequences of one forward, for all layers: (blocks, position of the first token, number of tokens) of each,
    with tokens stored one sequence after another. ``attends``: whether the kernel computes a piece's attention, or only
    stores its keys and values."""

    def __init__(self, pieces: Sequence[tuple[Sequence[int], int, int]], attends: Sequence[bool]) -> None:
        made, self._blocks, row = [], [], 0
        for (blocks, start, count), wanted in zip(pieces, attends, strict=True):
            numbers = (ctypes.c_int64 * len(blocks))(*blocks)
            self._blocks.append(numbers)  # keeps it alive: the array below has only its address
            made.append((ctypes.addressof(numbers), start, count, row, 1, int(wanted)))
            row += count
        self.array = (PagedPiece * len(made))(*made)
        self.tokens = row


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether there is a kernel for a cache of this dtype on this device."""
    return device.type == "cpu" and dtype in DTYPE_CODES and library() is not None


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: tuple[Tensor, Tensor],
    pieces: PagedPieces,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the keys and values of new tokens, and compute the attention of pieces over their own sequences.

    Args:
        query: [heads, tokens, key size].
        key, value: [kv heads, tokens, key size or value size], all of one dtype.
        pages: keys [blocks, kv heads, key size, block size] and values [.., block size, value size] of the cache.
        scale: factor of the scores.
        window: a token attends to itself and the ``window - 1`` before it; 0: to all before it.
        softcap: scores s become softcap * tanh(s / softcap); 0: unchanged.
        sinks: [heads], scores added to each softmax without a value.

    Returns:
        [tokens, heads, value size]; rows of pieces without attention are unset.
    """
    lib = library()
    assert lib is not None
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    keys, values = pages
    heads, tokens, key_size = query.shape
    output = torch.empty(tokens, heads, value.shape[-1], dtype=query.dtype)
    wide = None if sinks is None else sinks.float().contiguous()
    layer = GraphPagedLayer(
        *map(address, (keys, values, query, key, value, output, wide)),
        *(heads, keys.shape[1], keys.shape[3], key_size, value.shape[-1]),
        *(query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(window, scale, softcap, DTYPE_CODES[key.dtype], DTYPE_CODES[query.dtype]),
    )
    lib.ds_paged_attention(ctypes.byref(layer), pieces.array, len(pieces.array), torch.get_num_threads())
    return output
