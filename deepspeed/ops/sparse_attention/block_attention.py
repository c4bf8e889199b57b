"""Block-sparse attention, forward and backward.

Kernels on the host (``host_attention.py``) and, with Triton, on GPUs (``deepspeed.ops.gpu.block_sparse_attention``)
iterate over the blocks without materializing the scores. Backward recomputes the weights from the log-sum-exp, as in T.
Dao et al.: FlashAttention: Fast and memory-efficient exact attention with IO-awareness, 2022; it keeps tensors of the
size of the queries. On other devices, and for cases that the kernels do not support, the blocks of the scores are
materialized (``matmul.py``, ``softmax.py``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.gpu import usable
from deepspeed.ops.sparse_attention.host_attention import HostAttention, RowLists, runs_here
from deepspeed.ops.sparse_attention.matmul import Sampled, TimesDense
from deepspeed.ops.sparse_attention.softmax import BlockIndex, Softmax, blocks_of, columns_of


@dataclass(frozen=True)
class Masks:
    """Masks added to the scores, in addition to the layout: ``keys`` [batch, columns], ``scores`` [rows, columns]
    (floats; -inf: masked); ``causal``: later tokens are masked; ``positions`` [1 or batch, 1 or heads, rows,
    columns]."""

    keys: Tensor | None = None
    scores: Tensor | None = None
    causal: bool = False
    positions: Tensor | None = None

    def have_gradient(self) -> bool:
        """Return whether a mask other than positions requires grad, which no kernel computes."""
        masks = (self.keys, self.scores)
        return torch.is_grad_enabled() and any(mask is not None and mask.requires_grad for mask in masks)


class LayoutPlan:
    """A layout [heads, block rows, block columns] in the form that kernels read, built once. ``blocks``: number of
    present blocks over all heads."""

    def __init__(self, layout: Tensor, block: int) -> None:
        self.layout, self.block = layout, block
        self.heads, self.rows, self.columns = (int(size) for size in layout.shape)
        heads_of: dict[bytes, list[int]] = defaultdict(list)
        flags = (layout != 0).cpu()
        for head in range(self.heads):
            heads_of[flags[head].numpy().tobytes()].append(head)
        self.heads_of = list(heads_of.values())
        """The heads of each distinct layout."""
        self._flags = flags[[heads[0] for heads in self.heads_of]]  # [distinct layouts, rows, columns]
        self.blocks = int(flags.sum())
        self._on_gpus: dict[tuple[torch.device, bool], Any] = {}  # by device and whether causal

    @cached_property
    def row_lists(self) -> RowLists:
        return RowLists(self._flags, self._layout_of)

    def lists(self, *, causal: bool) -> tuple[RowLists, RowLists]:
        """Return the lists by row, and by column (the rows that attend to it). ``causal``: without blocks of later
        tokens."""
        flags = self._flags.tril() if causal else self._flags
        return RowLists(flags, self._layout_of), RowLists(flags.mT, self._layout_of)

    def on_gpu(self, device: torch.device, *, causal: bool) -> Any:
        """Return the ``BlockLayout`` of the GPU kernels."""
        from deepspeed.ops.gpu.block_sparse_attention import BlockLayout, Lists

        if (device, causal) not in self._on_gpus:
            by_rows, by_columns = (
                Lists(
                    rows.starts.to(device), rows.columns.to(device), rows.layout_of.to(device), rows.longest
                )
                for rows in self.lists(causal=causal)
            )
            members = [torch.tensor(heads, device=device) for heads in self.heads_of]
            self._on_gpus[device, causal] = BlockLayout(by_rows, by_columns, members, self.block)
        return self._on_gpus[device, causal]

    def index(self, device: torch.device) -> BlockIndex:
        """Return the positions of the blocks, on ``device``."""
        self._index = self._index.to(device)
        return self._index

    @cached_property
    def _index(self) -> BlockIndex:
        return BlockIndex(self.layout, self.block)

    @property
    def _layout_of(self) -> list[int]:
        layout_of = [0] * self.heads
        for number, heads in enumerate(self.heads_of):
            for head in heads:
                layout_of[head] = number
        return layout_of


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: LayoutPlan, masks: Masks, scale: float
) -> Tensor:
    """Compute attention in the blocks of ``plan``: [batch, heads, tokens, head size] in and out, any floating-point
    dtype.

    A fully masked row returns zeros. ValueError: masks of another size.
    """
    inputs = (query, key, value)
    if plan.rows == plan.columns and not masks.have_gradient():
        if usable(*inputs) and fits_gpu(*inputs):
            return gpu_attention(*inputs, plan, masks, scale)
        if masks.positions is None and runs_here(*inputs, plan.block):
            return HostAttention.apply(*inputs, plan.row_lists, plan.block, masks, scale)
    return _by_scores(*inputs, plan, masks, scale)


def fits_gpu(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the GPU kernels support these shapes and dtypes."""
    from deepspeed.ops.gpu.softmax_steps import supports

    return (
        query.shape == key.shape == value.shape
        and query.dtype == key.dtype == value.dtype
        and supports(query.dtype, query.shape[-1])
        and query.numel() > 0
    )


def gpu_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: LayoutPlan, masks: Masks, scale: float
) -> Tensor:
    """Compute `block_attention` by the kernels of ``deepspeed.ops.gpu.block_sparse_attention``."""
    from deepspeed.ops.gpu.block_sparse_attention import Added, BlockSparseAttention

    layout = plan.on_gpu(query.device, causal=masks.causal)
    added = Added(keys=masks.keys, scores=masks.scores, causal=masks.causal)
    return BlockSparseAttention.apply(query, key, value, masks.positions, layout, added, scale)


def _by_scores(
    query: Tensor, key: Tensor, value: Tensor, plan: LayoutPlan, masks: Masks, scale: float
) -> Tensor:
    """Compute `block_attention` from materialized blocks of the scores, in fp32 (fp64 if the inputs are)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (query, key, value))
    index = plan.index(query.device)
    scores = Sampled.apply(q, k.mT, index) * scale
    for bias in (masks.positions, masks.scores):
        scores = scores if bias is None else scores + blocks_of(bias, index)
    if masks.keys is not None:
        scores = scores + columns_of(masks.keys, index).unsqueeze(-2)
    if masks.causal:
        token = torch.arange(plan.block, device=query.device)
        row = (index.row % index.rows * plan.block)[:, None, None] + token[:, None]
        column = (index.column % index.columns * plan.block)[:, None, None] + token
        scores = scores.masked_fill(column > row, -math.inf)
    return TimesDense.apply(Softmax.sparse_softmax(scores, index), v, index, False).to(query.dtype)
