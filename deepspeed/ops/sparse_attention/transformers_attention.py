"""Block-sparse attention registered as an attention function of Transformers, for any model that looks one up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.transformers_models import attention_registries, text_config
from deepspeed.ops.sparse_attention.block_attention import LayoutPlan, Masks, block_attention
from deepspeed.ops.sparse_attention.softmax import as_bias
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig

NAME = "deepspeed_sparse"
"""Prefix of the names under which attentions are registered with Transformers."""

_MASKS = ("causal_mask_function", "bidirectional_mask_function")
_MIN_TOKENS = 2048
_REFUSED = ("position_bias", "s_aux", "softcap", "head_mask", "layer_head_mask")


class TransformersSparseAttention:
    """Attention over the layouts of one config, with causal masks within blocks, padding and grouped heads.

    Lengths need not be multiples of the block. The layout is made for a length that doubles, so that a growing sequence
    (``generate``) keeps its pattern; cached keys are seen as in one pass over the whole sequence. There is no dropout
    of attention weights.

    A rank may have only some of the heads (tensor parallelism), if all heads have the same layout.
    """

    def __init__(self, config: SparsityConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.calls = 0
        self._layout: Tensor | None = None
        self._plans: dict[tuple[int, int], LayoutPlan] = {}

    def layout(self, length: int, heads: int) -> Tensor:
        """Return [heads, blocks, blocks] for ``length`` tokens, rounded up to whole blocks. ValueError: the layout of
        these heads is not known."""
        block = self.config.block
        blocks = -(-length // block)
        if self._layout is None or self._layout.shape[1] < blocks:
            longest = -(-_MIN_TOKENS // block)
            while longest < blocks:
                longest *= 2
            self._layout = self.config.make_layout(longest * block)
            self._plans.clear()
        found = self._layout[:, :blocks, :blocks]
        if heads == len(found):
            return found
        if not bool((self._layout == self._layout[:1]).all()):
            raise ValueError(
                f"{self.name} has {heads} attention heads on this rank, but per-head layouts were made for "
                f"num_heads={len(found)}: with tensor parallelism all heads need the same layout; set "
                "different_layout_per_head=False"
            )
        return found[:1].expand(heads, blocks, blocks)

    def plan(self, length: int, heads: int) -> LayoutPlan:
        """Return the plan of the layout for ``length`` tokens, a multiple of the block; cached."""
        layout = self.layout(length, heads)
        if (length, heads) not in self._plans:
            self._plans[length, heads] = LayoutPlan(layout, self.config.block)
        return self._plans[length, heads]

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend, with the signature of Transformers' attention functions. ValueError: the model requests a feature
        that block-sparse attention does not have."""
        self.calls += 1
        self._check(key, attention_mask, kwargs)
        group = query.shape[1] // key.shape[1]
        if group > 1:
            key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
        given = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if given is None else given)
        attend = self._square if query.shape[2] == key.shape[2] else self._last_rows
        return attend(query, key, value, attention_mask, causal, scale).transpose(1, 2).contiguous(), None

    def _square(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        length = query.shape[2]
        missing = -length % self.config.block
        if missing:
            query, key, value = (nn.functional.pad(each, (0, 0, 0, missing)) for each in (query, key, value))
            if mask is None and not causal:
                mask = query.new_ones((1, length), dtype=torch.bool).expand(len(query), length)
            mask = None if mask is None else nn.functional.pad(mask, (0, missing))
        keys = None if mask is None else as_bias(mask, "mul", "attention_mask", query.dtype)
        plan = self.plan(length + missing, query.shape[1])
        out = block_attention(query, key, value, plan, Masks(keys=keys, causal=causal), scale)
        return out[:, :, :length]

    def _last_rows(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        """Attend from few queries, the last tokens of those that the keys have."""
        rows, columns, block = query.shape[2], key.shape[2], self.config.block
        query_index = torch.arange(columns - rows, columns)
        key_index = torch.arange(columns)
        layout = self.layout(columns, query.shape[1])
        seen = layout[:, query_index // block][:, :, key_index // block].bool()
        if causal:
            seen = seen & (query_index[:, None] >= key_index)
        seen = seen.to(query.device)[None]
        if mask is not None:
            seen = seen & mask[:, None, None, :columns].bool()
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)

    def _check(self, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
        given = [name for name in _REFUSED if kwargs.get(name) is not None]
        if given:
            raise ValueError(
                f"{self.name} passes {given[0]} to its attention, which sparse attention does not support"
            )
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != key.shape[2]):
            raise ValueError(
                f"{self.name} got an attention mask of shape {list(mask.shape)} for {key.shape[2]} keys: "
                "sparse attention supports padding masks [batch, tokens] and growing caches only"
            )


def takes_attention(model: nn.Module) -> bool:
    """Return whether this is a Transformers model whose attention can be selected by name."""
    config = getattr(model, "config", None)
    return config is not None and getattr(text_config(config), "_attn_implementation", None) is not None


def use_sparse_attention(model: nn.Module, config: SparsityConfig) -> TransformersSparseAttention:
    """Let all attention modules of a Transformers model use block-sparse attention.

    Raises:
        ValueError: the model has another number of heads, or (in its first forward) layers that did not call it,
            because they compute attention themselves.
    """
    text = text_config(model.config)
    heads = int(text.num_attention_heads)
    if heads != config.num_heads:
        raise ValueError(
            f"{type(model).__name__} has {heads} heads, but the sparsity config has num_heads={config.num_heads}"
        )
    attention = TransformersSparseAttention(config, type(model).__name__)
    _register(f"{NAME}_{id(attention):x}", attention, text)
    _check_first_forward(model, attention, int(getattr(text, "num_hidden_layers", 1)))
    return attention


def use_padding_masks(model: nn.Module) -> None:
    """Let a Transformers model pass the padding mask [batch, tokens], or None, to attention modules that replaced its
    own."""
    _register(NAME, _refuse_lookup, text_config(model.config))


def _register(name: str, attention: Callable[..., Any], text: Any) -> None:
    functions, masks = attention_registries("sparse attention in Transformers' models")
    from transformers.masking_utils import flash_attention_mask

    def padding(*args: Any, mask_function: Any = None, **kwargs: Any) -> Tensor | None:
        kind = getattr(mask_function, "__qualname__", str(mask_function))
        if mask_function is not None and kind not in _MASKS:
            raise ValueError(
                f"the model makes its attention mask with {kind} (a sliding window, or packed documents), which "
                "sparse attention does not support: pad instead of packing, and set windows in the sparsity config"
            )
        return flash_attention_mask(*args, **kwargs)

    functions.register(name, attention)
    masks.register(name, padding)
    text._attn_implementation = name


def _refuse_lookup(module: nn.Module, *_: Any, **__: Any) -> Any:
    raise ValueError(
        f"{type(module).__name__} selects its attention by name, but the attention of this model's layers "
        "was replaced by sparse self-attention"
    )


def _check_first_forward(model: nn.Module, attention: TransformersSparseAttention, layers: int) -> None:
    known, before = weakref.ref(attention), attention.calls

    def check(module: nn.Module, *_: Any) -> None:
        handle.remove()
        found = known()
        if found is not None and found.calls - before < layers:
            raise ValueError(
                f"{type(module).__name__} cannot use sparse attention: {found.calls - before} of its "
                f"{layers} layers called it; the others implement their own attention"
            )

    handle = model.register_forward_hook(check)
