"""Several documents in one row, for causal language models: no document sees another, and little is padding.

Positions begin at 0 with every document. Models of Transformers tell documents apart by that, if they get no attention
mask and no cache; models of one's own take `document_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is not predicted, in torch and Transformers."""


@dataclass(frozen=True)
class PackedRows:
    """Rows [rows, length], int64."""

    input_ids: Tensor
    labels: Tensor
    """`IGNORED` at the first token of a document, which nothing before it predicts, and at padding."""
    position_ids: Tensor
    """From 0 in each document, and in the padding at the end of a row."""
    padding: int
    """Tokens of padding in all rows."""


def plan_rows(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Assign documents to rows of ``max_length`` tokens: long ones first, each into the fullest row that has room for
    it (best fit). The rows, and the documents in each, are in the order of the documents.

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
        labels: of each document; None: its tokens.
        split: cut a document that is longer than a row into several, each of which is a document of its own.

    Raises:
        ValueError: a document is longer than a row, or does not have as many labels as tokens.
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
    """Return the attention mask, bool [rows, 1, tokens, tokens], True where a token sees another: tokens of the same
    document that are not later.

    As `torch.nn.functional.scaled_dot_product_attention` and Transformers (with `attn_implementation="sdpa"`) take it.
    """
    document = (position_ids == 0).cumsum(1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return same.tril().unsqueeze(1)


class PackingCollator:
    """A ``collate_fn``: samples with ``input_ids`` (and ``labels``), or bare token ids, to rows of several documents.

    Args:
        max_length: tokens of a row.
        pad_token_id: what fills the end of a row.
        split: as in `pack_documents`.
        mask: give an explicit ``attention_mask`` (`document_mask`), which takes memory quadratic in ``max_length``, for
            models that do not look at the positions. Without it the batch says ``use_cache=False``, as Transformers
            looks at positions only where nothing is cached.

    The counters ``tokens`` and ``padding`` are those of all batches that this process collated.
    """

    def __init__(
        self, max_length: int, pad_token_id: int = 0, *, split: bool = False, mask: bool = False
    ) -> None:
        self.max_length, self.pad_token_id, self.split, self.mask = max_length, pad_token_id, split, mask
        self.tokens = 0
        self.padding = 0

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """ValueError: some samples have labels and others have not, or what `pack_documents` says."""
        documents = [_document(sample) for sample in samples]
        with_labels = [labels for _, labels in documents if labels is not None]
        if with_labels and len(with_labels) < len(documents):
            raise ValueError(
                f"{len(with_labels)} of {len(documents)} samples have labels: give all of them labels"
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
    """Tokens and labels without the padding that the sample's attention mask shows."""
    if not isinstance(sample, Mapping):
        return _row(sample), None
    tokens, labels, mask = (sample.get(name) for name in ("input_ids", "labels", "attention_mask"))
    kept = torch.as_tensor(mask).reshape(-1).bool() if mask is not None else slice(None)
    return _row(tokens)[kept], None if labels is None else _row(labels)[kept]
