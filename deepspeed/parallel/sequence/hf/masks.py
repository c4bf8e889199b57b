"""Deferred attention masks of Transformers models, resolved once the whole sequence is known.

A mask built from one shard ignores document starts and padding in other shards. So the registered mask function returns
a `DeferredMask`, which the model passes on in the mask's place, and from which the attention builds what it needs: an
ordinary mask in evaluation, or the `Visibility` of the whole sequence, for which position ids and padding are gathered
once per forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.sequence.exchange import gather_lengths, join_shards
from deepspeed.parallel.sequence.visibility import Visibility, documents_of

_PACKED = {"packed_sequence_mask_function", "packed_sequence_compatibility_function"}
_KNOWN = _PACKED | {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
    "sliding_window_causal_mask_function", "and_masks", "padding_mask_function",
    "remap_positions_for_packed_sequence", "add_offsets_to_mask_function",
}  # fmt: skip
"""The parts of Transformers' mask functions that `Visibility` supports, or derives itself (packing)."""


@dataclass(eq=False)
class DeferredMask:
    """A deferred mask. ``arguments``: of the mask function; ``make``: the mask function of the local attention."""

    arguments: dict[str, Any]
    make: Callable[..., Any]
    _sequence: SequenceMetadata | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise ValueError: a model that computes with its mask computes attention itself."""
        raise ValueError(
            "this model cannot be trained with sequence parallelism: it computes attention itself (with the "
            f"mask it calls {getattr(func, '__name__', func)}) instead of using the registered attention, "
            "and would only see one shard of the sequence"
        )

    @cached_property
    def local(self) -> Any:
        """The mask without sequence parallelism."""
        return self.make(**self.arguments)

    @property
    def padding(self) -> Tensor | None:
        """Padding mask [batch, own tokens], bool or int, 0 at padding."""
        return self.arguments.get("attention_mask")

    def whole(self, make: Callable[[], SequenceMetadata]) -> SequenceMetadata:
        """Return this forward's whole sequence, which the first layer to call this creates by ``make``."""
        if self._sequence is None:
            self._sequence = make()
        return self._sequence

    def is_packed(self) -> bool:
        """Return whether the model detected packed documents in this shard."""
        return not parts_of_mask(self.arguments.get("mask_function")).isdisjoint(_PACKED)

    def unknown_parts(self) -> list[str]:
        """Return the parts of the mask function that shards do not support."""
        return sorted(parts_of_mask(self.arguments.get("mask_function")) - _KNOWN)


def mask_function_over(make: Callable[..., Any]) -> Callable[..., DeferredMask]:
    """Wrap the local attention's mask function into that of sequence parallelism."""

    def request(*args: Any, **kwargs: Any) -> DeferredMask:
        return DeferredMask(kwargs, lambda **own: make(*args, **own))

    return request


def no_mask(**_: Any) -> None:
    """Return None: the mask function for an attention without one."""


@dataclass(frozen=True, eq=False)
class SequenceMetadata:
    """Lengths of all shards; positions, packed documents and padding of the whole sequence, [batch, all tokens]."""

    lengths: tuple[int, ...]
    positions: Tensor | None = None
    documents: Tensor | None = None
    valid: Tensor | None = None

    def visibility(self, causal: bool, window: int | None) -> Visibility:
        return Visibility(causal=causal, window=window, documents=self.documents, valid=self.valid)


@untraced
def gather_sequence(
    comm: Communicator,
    query: Tensor,
    positions: Tensor | None,
    padding: Tensor | None,
    *,
    equal: bool,
    packed: bool | None = None,
) -> SequenceMetadata:
    """Gather the metadata of all shards of a query [batch, heads, tokens, size]. Collective; either all ranks have
    ``positions`` [1 or batch, tokens], or none; likewise ``padding`` [batch, tokens]. ``equal``: all shards have the
    same length, which is not exchanged then. ``packed``: whether the model detected packed documents in this shard;
    None: unknown.

    As in Transformers, packing is read from positions only if no padding is given.

    Raises:
        ValueError: on all ranks, if one of them detected packed documents without positions to locate them.
    """
    batch, tokens = query.shape[0], query.shape[2]
    if packed is not None and positions is None and padding is None:
        lengths = _lengths_of_one_document(tokens, packed, comm, query.device)
    else:
        lengths = (tokens,) * comm.size if equal else gather_lengths(tokens, comm, query.device)
    valid, documents, whole = None, None, None
    if padding is not None:
        if padding.dim() != 2 or padding.shape[-1] != tokens:
            raise ValueError(
                f"sequence parallelism needs the attention mask of a shard as [batch, {tokens}], got "
                f"{list(padding.shape)}"
            )
        valid = join_shards(padding.expand(batch, -1).long(), comm, dim=1, lengths=lengths).bool()
        valid = None if bool(valid.all()) else valid
    elif positions is not None and positions.dim() == 2 and positions.shape[-1] == tokens:
        whole = join_shards(positions.expand(batch, -1).long(), comm, dim=1, lengths=lengths)
        documents = documents_of(whole)
    return SequenceMetadata(lengths, whole, documents, valid)


def _lengths_of_one_document(
    tokens: int, packed: bool, comm: Communicator, device: torch.device
) -> tuple[int, ...]:
    """Return the lengths of all shards. A rank whose shard is packed sends the bitwise complement of its length, so
    that all ranks raise: one that raised alone would leave the others waiting."""
    lengths = gather_lengths(~tokens if packed else tokens, comm, device)
    if min(lengths) < 0:
        raise ValueError(
            "this model does not pass position_ids to its attention, so packed documents cannot be "
            "separated in a sharded sequence; pad instead of packing"
        )
    return lengths


def parts_of_mask(function: Any) -> set[str]:
    """Return the names of the functions that a mask function is composed of."""
    if not callable(function):
        return set()
    found = {getattr(function, "__qualname__", type(function).__name__).partition(".")[0]}
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for each in content if isinstance(content, (tuple, list)) else (content,):
            if callable(each) and not isinstance(each, (type, Tensor)):
                found |= parts_of_mask(each)
    return found
