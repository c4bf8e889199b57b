"""The packed layout: tokens of all sequences in one row, with our attention behind Transformers' attention interface.

Only attention connects the tokens of a decoder, so a row [1, tokens] of pieces of many sequences, with their positions,
is computed at once without padding. The model is unchanged: during a forward of this layout its config names our
attention, which writes the row's keys and values into the cache and reads those of each sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.transformers_models import attention_registries
from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.model.attention import AttentionTerms, PackedBatch, paged_attention
from deepspeed.inference.model.info import LayoutError, ModelInfo
from deepspeed.inference.model.low_rank import adapted
from deepspeed.parallel.sequence.hf.masks import parts_of_mask

NAME = "deepspeed_paged"
"""Name under which the attention is registered with Transformers."""

_CAUSAL = {"causal_mask_function", "packed_sequence_mask_function", "packed_sequence_compatibility_function"}
_SLIDING = {"sliding_window_overlay", "sliding_window_causal_mask_function"}
_JOINING = {"and_masks", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function"}
_REFUSED = ("position_bias", "head_mask", "layer_head_mask", "cache", "encoder_hidden_states")


@dataclass(eq=False)
class PackedForward:
    """One forward. With ``learning``, the cache is not touched; instead the layers' shapes and attention terms are
    recorded, and the parts of which the model composes its masks."""

    batch: PackedBatch
    learning: bool = False
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    terms: dict[int, AttentionTerms] = field(default_factory=dict)
    masks: set[str] = field(default_factory=set)


_current: ContextVar[PackedForward | None] = ContextVar("deepspeed_packed_forward", default=None)


class PackedLayout:
    """Runs ``module``, a causal model of Transformers."""

    name = "packed"
    max_fused_tokens = 0

    def __init__(self, module: nn.Module, info: ModelInfo) -> None:
        self.module = module
        self.info = info
        self.terms: dict[int, AttentionTerms] = {}
        """By layer number, once learned."""

    def learn(self, pieces: Sequence[PagePiece], block_size: int) -> dict[int, LayerShape]:
        """Derive each layer's key and value shapes per token from a forward without a cache.

        LayoutError: layers compute their own attention, or attention of an unknown kind.
        ImportError: Transformers is too old.
        """
        _register()
        if "position_ids" not in self.info.arguments:
            raise LayoutError("its forward does not accept position_ids")
        forward = PackedForward(
            PackedBatch(pieces, PagedCache({}, 0, block_size), self.info.device), learning=True
        )
        self._logits(forward)
        if len(forward.shapes) != self.info.layers:
            called = len(forward.shapes)
            raise LayoutError(f"{called} of its {self.info.layers} layers call the registered attention")
        unknown = forward.masks - _CAUSAL - _SLIDING - _JOINING
        if unknown:
            raise LayoutError(f"it makes its mask with {', '.join(sorted(unknown))}")
        told = sum(terms.window is not None for terms in forward.terms.values())
        expected = self.info.sliding_layers
        if told != expected if expected is not None else bool(forward.masks & _SLIDING) and not told:
            raise LayoutError("layers have a sliding window that they do not pass to their attention")
        self.terms = forward.terms
        return forward.shapes

    def release(self) -> None:
        """No-op: nothing of a cache is kept between forwards."""

    def forward(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor:
        """Return logits [wanted tokens of all pieces, vocabulary]."""
        return self._logits(PackedForward(PackedBatch(pieces, cache, self.info.device)))

    def hidden(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor:
        """Return the last hidden states [wanted tokens of all pieces, size], before the head."""
        forward = PackedForward(batch := PackedBatch(pieces, cache, self.info.device))
        return self._run(forward, self.module.base_model).last_hidden_state[0, batch.last]

    def _logits(self, forward: PackedForward) -> Tensor:
        last = forward.batch.last
        kept = {"logits_to_keep": last} if "logits_to_keep" in self.info.arguments else {}
        logits = self._run(forward, self.module, **kept).logits[0]
        return logits if kept else logits[last]

    def _run(self, forward: PackedForward, module: Any, **kwargs: Any) -> Any:
        """Return what ``module`` returns for the tokens of ``forward``."""
        batch, attention = forward.batch, _attention_of(self.info.config, forward)
        with attention, adapted(batch.pieces, batch.device), torch.inference_mode():
            return module(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **kwargs)


@contextlib.contextmanager
def _attention_of(config: Any, forward: PackedForward) -> Iterator[None]:
    before, token = config._attn_implementation, _current.set(forward)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _current.reset(token)


def _register() -> None:
    functions, masks = attention_registries("attention over a paged cache")
    functions.register(NAME, _forward)
    masks.register(NAME, _mask)


def _mask(*_: Any, mask_function: Callable[..., Any] | None = None, **__: Any) -> None:
    """Make no mask, as the pieces define visibility; record its parts, so that ``learn`` can refuse unknown ones."""
    forward = _current.get()
    if forward is not None:
        forward.masks |= parts_of_mask(mask_function)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement Transformers' attention function: [1, heads, tokens, size] -> [1, tokens, heads, size]."""
    forward = _current.get()
    if forward is None:
        raise LayoutError(f"the attention {NAME!r} can only be used by deepspeed's inference engine")
    layer = getattr(module, "layer_idx", None)
    given = [name for name in _REFUSED if kwargs.get(name) is not None]
    if layer is None or given or attention_mask is not None or not getattr(module, "is_causal", True):
        why = f"is given {given[0]}" if given else "is not causal attention with a layer index"
        raise LayoutError(f"{type(module).__name__} {why}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    terms = AttentionTerms(scale, sliding_window, softcap or None, s_aux)
    query, key, value = query[0], key[0], value[0]
    batch = forward.batch
    if forward.learning:
        forward.shapes[layer] = LayerShape.of(key, value)
        forward.terms[layer] = terms
        out = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
    else:
        out = paged_attention(query, key, value, batch, layer, terms)
    return out[None], None
