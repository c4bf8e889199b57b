"""Self-attention over a block-sparse layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepspeed.ops.sparse_attention.block_attention import LayoutPlan, Masks, block_attention
from deepspeed.ops.sparse_attention.softmax import as_bias
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig


class SparseSelfAttention(nn.Module):
    """``softmax(query @ key.T / sqrt(head size) + masks) @ value``, only in the blocks of a layout.

    Time and memory are proportional to the number of blocks; the layout is compiled on first use. The buffer
    ``master_layout`` is the layout for ``max_seq_length`` tokens; shorter sequences use its corner, so that random
    blocks stay in place. It is part of the module's state: checkpoints contain it, and ``deepspeed.initialize`` and DDP
    broadcast that of the first rank.

    Args:
        sparsity_config: the pattern.
        key_padding_mask_mode, attn_mask_mode: "add": the mask is added to the scores; "mul": 0 masks, anything else
            does not.
        max_seq_length: maximum tokens of a sequence. Longer sequences work, each length with its own layout.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig = SparsityConfig(num_heads=4),  # noqa: B008 (the documented default)
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        blocks = -(-max_seq_length // sparsity_config.block)
        self.register_buffer("master_layout", sparsity_config.make_layout(blocks * sparsity_config.block))
        self._plans: dict[int, LayoutPlan] = {}
        self._compiled_of: tuple[Tensor, int] | None = None

    def get_layout(self, L: int) -> Tensor:
        """Return [heads, block rows, block columns] for ``L`` tokens. ValueError: the block size does not divide
        ``L``."""
        block = self.sparsity_config.block
        if L % block != 0:
            raise ValueError(
                f"a sequence of {L} tokens is not a multiple of block={block}: pad it "
                "(SparseAttentionUtils.pad_to_block_size)"
            )
        if L // block > self.master_layout.shape[1]:
            self.master_layout = self.sparsity_config.make_layout(L).to(self.master_layout.device)
        return self.master_layout[..., : L // block, : L // block]

    def transpose_key_for_scores(self, x: Tensor, L: int) -> Tensor:
        """Return keys as [batch, heads, tokens, head size], also if their last two dims are swapped."""
        return x if x.shape[-2] == L else x.transpose(-1, -2)

    def transpose_mask_for_sparse(
        self, qtype: torch.dtype, x: Tensor, is_key_padding_mask: bool = False
    ) -> Tensor:
        """Return a mask in the dtype of the scores without dims of size 1: [batch, tokens] for keys, otherwise [tokens,
        tokens]."""
        x = x.to(qtype)
        if not is_key_padding_mask:
            return x.squeeze()
        for dim in range(x.dim() - 1, 0, -1):
            x = x.squeeze(dim)
        return x

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend: [batch, heads, tokens, head size] in and out, any floating-point dtype; keys may be transposed.

        Args:
            rpe: relative positions, added to the scores: [(batch,) (heads,) tokens, tokens]; has a gradient.
            key_padding_mask: [batch, tokens], or with dims of size 1 in between.
            attn_mask: [tokens, tokens].

        Raises:
            NotImplementedError: keys or values of another length than the query (cross-attention).
            ValueError: sizes that do not match the layout or each other.
        """
        batch, heads, length, size = query.shape
        key = self.transpose_key_for_scores(key, length)
        if query.shape != key.shape or key.shape != value.shape:
            raise NotImplementedError(
                f"sparse attention is self-attention: query {list(query.shape)}, key {list(key.shape)} and "
                f"value {list(value.shape)} must have the same shape"
            )
        if key_padding_mask is not None:
            key_padding_mask = self.transpose_mask_for_sparse(query.dtype, key_padding_mask, True)
            key_padding_mask = key_padding_mask.reshape(-1, length).expand(batch, length)
        if attn_mask is not None:
            attn_mask = self.transpose_mask_for_sparse(query.dtype, attn_mask).reshape(length, length)
        scale = float(size) ** -0.5
        masks = Masks(
            None
            if key_padding_mask is None
            else as_bias(key_padding_mask, self.key_padding_mask_mode, "key_padding_mask", query.dtype),
            None if attn_mask is None else as_bias(attn_mask, self.attn_mask_mode, "attn_mask", query.dtype),
            positions=None if rpe is None else _positions(rpe, query),
        )
        return block_attention(query, key, value, self.plan(heads, length), masks, scale)

    def plan(self, heads: int, length: int) -> LayoutPlan:
        """Return the plan of the layout for ``length`` tokens; cached. ValueError: the layout does not have ``heads``
        heads."""
        self._forget_if_changed(heads)
        if length not in self._plans:
            self._plans[length] = LayoutPlan(self.get_layout(length), self.sparsity_config.block)
        return self._plans[length]

    def _forget_if_changed(self, heads: int) -> None:
        """Drop compiled plans if the layout changed: a checkpoint was loaded or the module was moved."""
        layout = self.master_layout
        if layout.shape[0] != heads:
            raise ValueError(
                f"the layout has {layout.shape[0]} heads, but the query has {heads}: set num_heads={heads} "
                "in the sparsity config"
            )
        known = self._compiled_of
        if known is None or known[0] is not layout or known[1] != layout._version:
            self._plans.clear()
            self._compiled_of = (layout, layout._version)


def _positions(rpe: Tensor, query: Tensor) -> Tensor:
    """Return the positions as [1 or batch, 1 or heads, tokens, tokens]. ValueError: another shape."""
    batch, heads, length, _ = query.shape
    fits = rpe.dim() <= 4 and tuple(rpe.shape[-2:]) == (length, length)
    full = rpe.reshape((1,) * (4 - rpe.dim()) + tuple(rpe.shape)) if fits else rpe
    if not fits or full.shape[0] not in (1, batch) or full.shape[1] not in (1, heads):
        raise ValueError(
            f"rpe has shape {list(rpe.shape)}, expected [(batch,) (heads,) tokens, tokens] for a query of shape "
            f"{list(query.shape)}"
        )
    return full
