"""Packing of several documents per row, for causal language models: no attention across documents, little padding.

Positions restart at 0 with every document. Transformers models separate documents by that, if they get no attention
mask and no cache; for other models use `document_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token that the loss ignores, in torch and Transformers."""


@dataclass(frozen=True)
class PackedRows:
    """Packed rows; tensors are int64 [rows, length]."""

    input_ids: Tensor
    labels: Tensor
    """`IGNORED` at the first token of each document, which has no predecessor, and at padding."""
    position_ids: Tensor
    """Restarts at 0 in each document, and in the padding at the end of a row."""
    padding: int
    """Tokens of padding in all rows."""


def plan_rows(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Assign documents to rows of ``max_length`` tokens: longest first, each into the fullest row with enough space
    (best fit). Rows, and documents within a row, are sorted by document number.

    ValueError: a document is longer than a row.
    """
    if max_length < 1:
        raise ValueError(f"max_length={max_length} must be at least 1")
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        length = lengths[number]
        if length > max_length:
            raise ValueError(
                f"document {number} has {length} tokens and max_length={max_length}: raise it, or set split=True"
            )
        fitting = [row for row, left in enumerate(room) if left >= length]
        if length and not fitting:
            rows.append([number])
            room.append(max_length - length)
        elif length:
            row = min(fitting, key=lambda candidate: room[candidate])
            rows[row].append(number)
            room[row] -= length
    return sorted(sorted(row) for row in rows)


def pack_documents(
    documents: Sequence[Any],
    max_length: int,
    *,
    labels: Sequence[Any] | None = None,
    pad_token_id: int = 0,
    split: bool = False,
) -> PackedRows:
    """Put documents (token ids [n] each) into rows of ``max_length`` tokens.

    Args:
        labels: labels of each document; None: its tokens.
        split: cut a document that is longer than a row into several separate documents.

    Raises:
        ValueError: a document is longer than a row, or its numbers of labels and tokens differ.
    """
    pieces: list[tuple[Tensor, Tensor]] = []
    for number, document in enumerate(documents):
        tokens = _row(document)
        wanted = tokens if labels is None else _row(labels[number])
        if len(wanted) != len(tokens):
            raise ValueError(f"document {number} has {len(tokens)} tokens and {len(wanted)} labels")
        step = max_length if split else max(1, len(tokens))
        pieces += zip(tokens.split(step), wanted.split(step), strict=True)
    rows = plan_rows([len(tokens) for tokens, _ in pieces], max_length)
    shape = (len(rows), max_length)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    targets = torch.full(shape, IGNORED, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    used = 0
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            tokens, wanted = pieces[number]
            end = start + len(tokens)
            input_ids[row, start:end] = tokens
            targets[row, start + 1 : end] = wanted[1:]
            positions[row, start:end] = torch.arange(end - start)
            start = end
        positions[row, start:] = torch.arange(max_length - start)
        used += start
    return PackedRows(input_ids, targets, positions, input_ids.numel() - used)


def _row(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64).reshape(-1)


def document_mask(position_ids: Tensor) -> Tensor:
    """Return the attention mask, bool [rows, 1, tokens, tokens], True where a token attends: the same document, not
    later.

    In the format of `torch.nn.functional.scaled_dot_product_attention` and Transformers (`attn_implementation="sdpa"`).
    """
    document = (position_ids == 0).cumsum(1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return same.tril().unsqueeze(1)


class PackingCollator:
    """A ``collate_fn`` that packs samples with ``input_ids`` (and ``labels``), or bare token ids, into rows.

    Args:
        max_length: tokens of a row.
        pad_token_id: token that fills the end of a row.
        split: as in `pack_documents`.
        mask: add an explicit ``attention_mask`` (`document_mask`), of memory quadratic in ``max_length``, for models
            that do not use positions. Without it the batch has ``use_cache=False``, as Transformers uses positions
            only without a cache.

    The counters ``tokens`` and ``padding`` add up over all batches collated in this process.
    """

    def __init__(
        self, max_length: int, pad_token_id: int = 0, *, split: bool = False, mask: bool = False
    ) -> None:
        self.max_length, self.pad_token_id, self.split, self.mask = max_length, pad_token_id, split, mask
        self.tokens = 0
        self.padding = 0

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Pack the samples. ValueError: only some samples have labels, or as in `pack_documents`."""
        documents = [_document(sample) for sample in samples]
        with_labels = [labels for _, labels in documents if labels is not None]
        if with_labels and len(with_labels) < len(documents):
            raise ValueError(
                f"{len(with_labels)} of {len(documents)} samples have labels: provide labels for all of them"
            )
        rows = pack_documents(
            [tokens for tokens, _ in documents],
            self.max_length,
            labels=with_labels or None,
            pad_token_id=self.pad_token_id,
            split=self.split,
        )
        self.tokens += rows.input_ids.numel() - rows.padding
        self.padding += rows.padding
        batch: dict[str, Any] = {
            "input_ids": rows.input_ids,
            "labels": rows.labels,
            "position_ids": rows.position_ids,
        }
        if self.mask:
            return batch | {"attention_mask": document_mask(rows.position_ids)}
        return batch | {"use_cache": False}


def _document(sample: Any) -> tuple[Tensor, Tensor | None]:
    """Return a sample's tokens and labels without padding, by its attention mask."""
    if not isinstance(sample, Mapping):
        return _row(sample), None
    tokens, labels, mask = (sample.get(name) for name in ("input_ids", "labels", "attention_mask"))
    kept = torch.as_tensor(mask).reshape(-1).bool() if mask is not None else slice(None)
    return _row(tokens)[kept], None if labels is None else _row(labels)[kept]
