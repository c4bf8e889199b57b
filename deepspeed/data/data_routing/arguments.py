"""Arguments that a layer is given per token: masks, positions, their embeddings. The layer gets the part of each that
belongs to the tokens that it keeps.

Names and shapes say what an argument is. With B sequences of S tokens:

    [B or 1, S, ...], [B or 1, 1, S, ...], [axes, B, S, ...]   one entry per token of each sequence
    [B or 1, ..., S or 1, S], called mask or bias, or bool     one per pair of tokens, or per token that is looked at
    [S, ...], [S, S] called mask or bias                       one per token, for all sequences together

Where an argument has no batch dimension, all sequences of the batch keep the same tokens: no argument then changes its
number of dimensions, so that whatever the layer does with it still broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.random_ltd.dropping_utils import square_at

_PAIRS = ("mask", "bias", "alibi")
_LINES = ("attention_mask", "padding")
"""Names of masks [B, S], where [S, S] would fit as well."""
_CACHES = ("past_key_values", "past_key_value", "layer_past", "use_cache", "cache_params")
_PACKED = ("cu_seq_lens", "cu_seqlens", "seq_idx")
_OF_OTHERS = ("encoder_", "cross_")
"""Arguments about other sequences."""


@dataclass(frozen=True, slots=True)
class Form:
    """Layout of tokens in a tensor. ``batch``: its dimension of sequences, None: none; ``tokens``: its dimensions of
    tokens; ``pairs``: the last two are (queries, keys)."""

    batch: int | None
    tokens: tuple[int, ...]
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """``sequences`` of ``length`` tokens."""

    sequences: int
    length: int
    batch_first: bool

    def form(self, name: str, tensor: Tensor) -> Form | None:
        """None: the tensor has nothing to do with tokens."""
        shape = tuple(tensor.shape)
        if self.length not in shape or name.startswith(_OF_OTHERS):
            return None
        paired = any(word in name for word in _PAIRS) or tensor.dtype == torch.bool
        if len(shape) == 1:
            return Form(None, (0,))
        if len(shape) == 2:
            return self._flat(name, shape, paired)
        return self._paired(shape) if paired else self._entries(name, shape)

    def _flat(self, name: str, shape: tuple[int, ...], paired: bool) -> Form | None:
        lines = shape[0] in (1, self.sequences) and shape[1] == self.length
        either = self.sequences == self.length and any(word in name for word in _LINES)
        if shape == (self.length, self.length) and paired and not either:
            return Form(None, (0, 1))
        if not self.batch_first and shape[0] == self.length and shape[1] in (1, self.sequences):
            return Form(1, (0,))
        if lines:
            return Form(0, (1,))
        return Form(None, (0,)) if shape[0] == self.length else None

    def _paired(self, shape: tuple[int, ...]) -> Form | None:
        if shape[-1] != self.length or shape[-2] not in (1, self.length):
            return None
        heads = len(shape) == 3 and shape[0] % self.sequences == 0
        return Form(0, (-2, -1), pairs=True) if heads or shape[0] in (1, self.sequences) else None

    def _entries(self, name: str, shape: tuple[int, ...]) -> Form | None:
        batches = (1, self.sequences)
        if not self.batch_first and shape[0] == self.length and shape[1] in batches:
            return Form(1, (0,))
        axes = "position" in name and shape[0] == 3 and shape[1] in batches and shape[2] == self.length
        if not axes and shape[0] in batches:
            for dim in (1, 2):
                if shape[dim] == self.length:
                    return Form(0, (dim,))
        if shape[1] in batches and shape[2] == self.length:
            return Form(1, (2,))
        return Form(None, (0,)) if shape[0] == self.length else None


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Arguments at the ``indices`` [B, kept] of the tokens that a layer keeps. ``shared``: they are the same in all
    rows."""

    batch: Batch
    indices: Tensor
    shared: bool

    def of(self, name: str, value: Any) -> Any:
        """``value`` as the layer gets it.

        ValueError: a part of it for fewer tokens cannot be given.
        """
        if name in _CACHES:
            return None if name != "use_cache" else False
        if value is not None and name.startswith(_PACKED):
            raise ValueError(
                f"random-LTD: {name} packs several sequences into one row, and dropped tokens would move its borders: "
                "train without packing, or take this layer out of random_ltd_layer_id"
            )
        if type(value).__name__ == "BlockMask":
            raise ValueError(
                f"random-LTD: {name} is a BlockMask of flex_attention, which cannot be cut to single tokens: load the "
                "model with attn_implementation='sdpa'"
            )
        return _mapped(name, value, self._tensor)

    def _tensor(self, name: str, tensor: Tensor) -> Tensor:
        form = self.batch.form(name, tensor)
        if form is None:
            return tensor
        if self.shared:
            for dim in form.tokens:
                if tensor.shape[dim] > 1:
                    tensor = tensor.index_select(dim, self.indices[0])
            return tensor
        if form.batch is None:  # the positions of a cache: those of each row
            return tensor[self.indices]
        if form.pairs:
            return self._pairs(tensor)
        (dim,) = form.tokens
        sizes = list(tensor.shape)
        sizes[form.batch] = self.batch.sequences
        shape = [1] * tensor.dim()
        shape[dim] = -1
        shape[form.batch] = self.batch.sequences
        indices = self.indices if form.batch < dim else self.indices.t()
        return tensor.expand(sizes).take_along_dim(indices.reshape(shape), dim)

    def _pairs(self, tensor: Tensor) -> Tensor:
        if tensor.dim() > 3 or tensor.shape[0] in (1, self.batch.sequences):
            return square_at(tensor, self.indices)
        by_sequence = tensor.unflatten(0, (self.batch.sequences, -1))  # [sequences * heads, ...]
        return square_at(by_sequence, self.indices).flatten(0, 1)


def has_common_tokens(batch: Batch, arguments: Mapping[str, Any]) -> bool:
    """Return whether an argument has tokens but no batch dimension, so that all sequences have to keep the same
    ones."""
    return any(
        name != "cache_position" and (form := batch.form(name, tensor)) is not None and form.batch is None
        for key, value in arguments.items()
        for name, tensor in _tensors(key, value)
    )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(name, entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(name, entry)


def _mapped(name: str, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(name, value)
    if type(value) is dict:
        return {key: _mapped(name, entry, change) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(name, entry, change) for entry in value)
    return value
