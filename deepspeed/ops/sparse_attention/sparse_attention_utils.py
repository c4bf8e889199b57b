"""Adapt models and inputs to block-sparse attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.ops.sparse_attention.bert_sparse_self_attention import TransformersBertAttention
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig
from deepspeed.ops.sparse_attention.transformers_attention import (
    takes_attention,
    use_padding_masks,
    use_sparse_attention,
)

_RESERVED = {"bert": 0, "roberta": 2}
"""Rows of the position table before the first token's."""


class SparseAttentionUtils:
    """Static functions: extend position tables, replace a model's attention, pad to whole blocks."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Repeat the position table of a BERT or RoBERTa model up to ``max_position`` positions; return the model.

        ValueError: the model is neither, or its table is that long already.
        """
        kind = _kind(model, "extend its position embedding yourself")
        reserved = _RESERVED[kind]
        embeddings = getattr(model, kind).embeddings
        table = embeddings.position_embeddings
        old = table.weight.data
        known = old[reserved:]
        if max_position <= len(known):
            raise ValueError(f"max_position={max_position}: the model already has {len(known)} positions")
        rows = torch.arange(max_position, device=old.device) % len(known)
        table.weight.data = torch.cat([old[:reserved], known[rows]])
        table.num_embeddings = reserved + max_position
        for name in ("position_ids", "token_type_ids"):
            buffer = getattr(embeddings, name, None)
            if buffer is not None:
                ids = torch.arange(reserved + max_position, device=buffer.device, dtype=buffer.dtype)[None]
                setattr(embeddings, name, ids if name == "position_ids" else torch.zeros_like(ids))
        config: Any = model.config
        config.max_position_embeddings = reserved + max_position
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Let a tokenizer produce up to ``max_position`` tokens; return the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module,
        max_position: int,
        sparsity_config: SparsityConfig = SparsityConfig(num_heads=4),  # noqa: B008 (the documented default)
    ) -> nn.Module:
        """Make a model's attention block-sparse, keeping its weights; return the model.

        BERT and RoBERTa get `BertSparseSelfAttention` in their layers. Any other Transformers model whose attention
        is chosen by name gets it that way.

        Args:
            model: with its weights.
            max_position: tokens of the longest sequence, for BERT and RoBERTa.
            sparsity_config: with as many heads as the model.

        Raises:
            ValueError: another kind of model, or another number of heads.
        """
        kind = next((name for name in _RESERVED if hasattr(model, name)), None)
        if kind is None and takes_attention(model):
            use_sparse_attention(model, sparsity_config)
            return model
        kind = _kind(model, "replace its attention by SparseSelfAttention yourself")
        config: Any = model.config
        config.max_position_embeddings = max_position + _RESERVED[kind]
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            config, getattr(model, kind).encoder.layer, sparsity_config
        )
        use_padding_masks(model)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any,
        layers: Iterable[nn.Module],
        sparsity_config: SparsityConfig = SparsityConfig(num_heads=4),  # noqa: B008 (the documented default)
    ) -> Iterable[nn.Module]:
        """Replace ``layer.attention.self`` of each of ``layers`` by a `BertSparseSelfAttention` with the same weights;
        return the layers. ValueError: the pattern has another number of heads."""
        if sparsity_config.num_heads != config.num_attention_heads:
            raise ValueError(
                f"the model has {config.num_attention_heads} heads, but the sparsity config has "
                f"num_heads={sparsity_config.num_heads}"
            )
        for layer in layers:
            attention: Any = layer.attention
            old = attention.self
            sparse = TransformersBertAttention(config, sparsity_config)
            sparse.query, sparse.key, sparse.value = old.query, old.key, old.value
            sparse.train(old.training)
            sparse.sparse_self_attention.to(old.query.weight.device)
            attention.self = sparse
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad a batch [batch, tokens (, hidden)] to whole blocks.

        Args:
            block_size: tokens per block.
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: None stays None. Padding tokens
                are ``pad_token_id``, masked, and have type 0 and position ``pad_token_id``.
            pad_token_id: the token to pad with.
            model_embeddings: embedding table for the padding token, for ``inputs_embeds``.

        Returns:
            The number of padding tokens, and the five tensors.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise ValueError("pad_to_block_size needs input_ids or inputs_embeds")
        batch, length = tokens.shape[:2]
        missing = -length % block_size
        if missing == 0:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            ids = torch.full((batch, missing), pad_token_id, dtype=torch.long, device=inputs_embeds.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids)], dim=-2)

        def padded(x: Tensor | None, value: int) -> Tensor | None:
            return None if x is None else functional.pad(x, (0, missing), value=value)

        return (
            missing,
            padded(input_ids, pad_token_id),
            padded(attention_mask, 0),
            padded(token_type_ids, 0),
            padded(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Return ``sequence_output`` [batch, tokens, hidden] without its last ``pad_len`` tokens."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output


def _kind(model: nn.Module, instead: str) -> str:
    kind = next((name for name in _RESERVED if hasattr(model, name)), None)
    if kind is None:
        raise ValueError(f"{type(model).__name__} is neither BERT nor RoBERTa: {instead}")
    return kind
