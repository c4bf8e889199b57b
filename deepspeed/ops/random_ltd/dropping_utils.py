"""Sample the tokens that a layer keeps, gather them, and scatter the results back.

Every row of a batch keeps its own tokens, in ascending order and each at most once. So hidden states move as whole
contiguous rows, by ``index_select`` and ``index_copy`` on the batch viewed as [batch * tokens, hidden], and no gradient
sums over equal indices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gpt_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sample the tokens that each decoder layer keeps, with torch's generator of ``device``.

    Returns:
        Indices int64 [layers, batch, reserved], ascending; and the mask [batch or 1, 1, reserved, reserved], the upper
        left part of a causal ``attn_mask`` [batch or 1, 1, tokens, tokens]: order is preserved, so one mask fits all.
    """
    if not 0 < reserved_length <= seq_length:
        raise ValueError(f"reserved_length={reserved_length} must be between 1 and seq_length={seq_length}")
    order = torch.rand(layers, batch_size, seq_length, device=device)
    indices = order.topk(reserved_length, sorted=False).indices.sort().values
    mask = None if attn_mask is None else attn_mask[:, :, :reserved_length, :reserved_length]
    return indices, mask


def square_at(mask: Tensor, indices: Tensor) -> Tensor:
    """Select ``mask`` [batch or 1, ..., queries, keys] at ``indices`` [batch, kept] in both dims; a dim of size 1
    stays."""
    batch = indices.shape[0]
    mask = mask.expand(batch, *mask.shape[1:])
    lead = (batch, *[1] * (mask.dim() - 3))
    if mask.shape[-2] > 1:
        mask = mask.take_along_dim(indices.view(*lead, -1, 1), -2)
    return mask.take_along_dim(indices.view(*lead, 1, -1), -1)


def rows_of(indices: Tensor, length: int, batch_first: bool) -> Tensor:
    """Map ``indices`` [batch, kept] to rows of activations viewed as [batch * tokens, ...], or as [tokens * batch,
    ...]; int64 [batch * kept] in the order of the activations."""
    batch = indices.shape[0]
    batch_index = torch.arange(batch, device=indices.device).unsqueeze(1)
    indices = indices.to(torch.int64)
    flat = indices + batch_index * length if batch_first else (indices * batch + batch_index).t()
    return flat.reshape(-1)


def _selected(activations: Tensor, rows: Tensor, kept: int, batch_first: bool) -> Tensor:
    shape = list(activations.shape)
    shape[1 if batch_first else 0] = kept
    return activations.flatten(0, 1).index_select(0, rows).view(shape)


class GatherTokens(torch.autograd.Function):
    """``apply(activations, sorted_indices, batch_first)`` -> (activations, the tokens at the indices).

    ``activations``: [batch, tokens, hidden], or [tokens, batch, hidden] unless ``batch_first``; ``sorted_indices``:
    [batch, kept].
    """

    @staticmethod
    def forward(
        ctx: Any, activations: Tensor, sorted_indices: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        length = activations.shape[1 if batch_first else 0]
        rows = rows_of(sorted_indices, length, batch_first)
        ctx.save_for_backward(rows)
        ctx.set_materialize_grads(False)
        ctx.shape = activations.shape
        return activations, _selected(activations, rows, sorted_indices.shape[1], batch_first)

    @staticmethod
    def backward(ctx: Any, a_gradients: Tensor | None, g_gradients: Tensor | None) -> Any:  # type: ignore[override]
        if g_gradients is None:
            return a_gradients, None, None
        (rows,) = ctx.saved_tensors
        flat = g_gradients.flatten(0, 1)
        if a_gradients is None:
            whole = flat.new_zeros(ctx.shape).flatten(0, 1).index_copy(0, rows, flat)
        else:
            whole = a_gradients.flatten(0, 1).index_add(0, rows, flat.to(a_gradients.dtype))
        return whole.view(ctx.shape), None, None


class ScatterTokens(torch.autograd.Function):
    """``apply(all_activations, layer_activations, sorted_indices, batch_first)`` -> all activations, with those of the
    layer at its tokens; shapes as for :class:`GatherTokens`."""

    @staticmethod
    def forward(
        ctx: Any,
        all_activations: Tensor,
        layer_activations: Tensor,
        sorted_indices: Tensor,
        batch_first: bool,
    ) -> Tensor:
        length = all_activations.shape[1 if batch_first else 0]
        rows = rows_of(sorted_indices, length, batch_first)
        ctx.save_for_backward(rows)
        ctx.kept, ctx.batch_first, ctx.dtype = sorted_indices.shape[1], batch_first, layer_activations.dtype
        source = layer_activations.flatten(0, 1).to(all_activations.dtype)
        return all_activations.flatten(0, 1).index_copy(0, rows, source).view(all_activations.shape)

    @staticmethod
    def backward(ctx: Any, out_gradients: Tensor) -> Any:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        rest = part = None
        if ctx.needs_input_grad[0]:
            rest = out_gradients.flatten(0, 1).index_fill(0, rows, 0.0).view(out_gradients.shape)
        if ctx.needs_input_grad[1]:
            part = _selected(out_gradients, rows, ctx.kept, ctx.batch_first).to(ctx.dtype)
        return rest, part, None, None
