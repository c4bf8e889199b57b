"""Block-sparse attention on a GPU: calls of the Triton kernels of ``deepspeed.ops.gpu.block_sparse_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.gpu import usable
from deepspeed.ops.sparse_attention.tiles import TilePlan


def runs_here(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernels compute these."""
    return usable(query, key, value) and fits(query, key, value)


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernels take these shapes and dtypes."""
    from deepspeed.ops.gpu.softmax_steps import takes

    return (
        query.shape == key.shape == value.shape
        and query.dtype == key.dtype == value.dtype
        and takes(query.dtype, query.shape[-1])
        and query.numel() > 0
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: TilePlan,
    keys: Tensor | None,
    scores: Tensor | None,
    positions: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """[batch, heads, tokens, size] in and out; masks as in ``block_attention.Masks``."""
    from deepspeed.ops.gpu.block_sparse_attention import Added, BlockSparseAttention

    layout = _layout(plan, query.device, causal)
    added = Added(keys=keys, scores=scores, causal=causal)
    return BlockSparseAttention.apply(query, key, value, positions, layout, added, scale)


def _layout(plan: TilePlan, device: torch.device, causal: bool) -> Any:
    from deepspeed.ops.gpu.block_sparse_attention import BlockLayout, Lists

    if (device, causal) not in plan.on_devices:
        by_rows, by_columns = (
            Lists(each.starts.to(device), each.columns.to(device), each.layout_of.to(device), each.longest)
            for each in plan.lists(causal=causal)
        )
        members = [torch.tensor(heads, device=device) for heads in plan.heads_of]
        plan.on_devices[device, causal] = BlockLayout(by_rows, by_columns, members, plan.block)
    return plan.on_devices[device, causal]
