"""Attention visibility between tokens of the whole sequence, which a mask of one shard cannot express."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from deepspeed.ops.attention_blocks import CAUSAL, Mask


def documents_of(positions: Tensor) -> Tensor | None:
    """Return the document index of each token [batch, tokens] in packed rows, from position ids [batch, tokens]: a
    document begins where positions are not consecutive. None if every row is one document."""
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


@dataclass(frozen=True, eq=False, kw_only=True)
class Visibility:
    """A query attends to a key in the same document (``documents`` [batch, tokens]) that is not padding (``valid``
    [batch, tokens], bool) and, if ``causal``, is not later and fewer than ``window`` tokens before."""

    causal: bool
    window: int | None = None
    documents: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ValueError("sequence parallelism supports sliding windows in causal attention only")

    def is_plain(self, length: int) -> bool:
        """Return whether all ``length`` tokens are one document, without padding or an effective window."""
        return (
            self.documents is None and self.valid is None and (self.window is None or self.window >= length)
        )

    def mask(self, rows: range, columns: range, device: torch.device) -> Tensor | None:
        """Return the mask of keys ``columns`` visible to queries ``rows``, bool [batch or 1, 1, rows, columns]; None if
        all are."""
        parts: list[Tensor] = []
        if self.causal and (columns.stop - 1 > rows.start or self._cut(rows, columns)):
            row = torch.arange(rows.start, rows.stop, device=device)[:, None]
            column = torch.arange(columns.start, columns.stop, device=device)[None, :]
            seen = column <= row
            if self.window is not None:
                seen &= column > row - self.window
            parts.append(seen[None, None])
        if self.documents is not None:
            row = self.documents[:, None, rows.start : rows.stop, None]
            parts.append(row == self.documents[:, None, None, columns.start : columns.stop])
        if self.valid is not None:
            parts.append(self.valid[:, None, None, columns.start : columns.stop])
        return reduce(torch.bitwise_and, parts) if parts else None

    def block(self, rows: range, columns: range, device: torch.device) -> Mask:
        """Return ``mask``, or CAUSAL if that is equivalent."""
        uncut = self.documents is None and self.valid is None and not self._cut(rows, columns)
        if self.causal and uncut and rows == columns:
            return CAUSAL
        return self.mask(rows, columns, device)

    def is_empty(self, rows: range, columns: range) -> bool:
        """Return whether causality and window alone make all keys invisible."""
        if not self.causal:
            return False
        too_far = self.window is not None and columns.stop - 1 <= rows.start - self.window
        return columns.start > rows.stop - 1 or too_far

    def segments(self) -> list[list[tuple[int, int]]] | None:
        """Return the bounds of the documents of each row of the batch; None without documents, or with padding."""
        if self.documents is None or self.valid is not None:
            return None
        return [_runs(row) for row in self.documents.cpu()]

    def _cut(self, rows: range, columns: range) -> bool:
        return self.window is not None and columns.start <= rows.stop - 1 - self.window


def _runs(numbers: Tensor) -> list[tuple[int, int]]:
    ends = torch.nonzero(numbers[1:] != numbers[:-1]).flatten().add(1).tolist()
    return list(zip([0, *ends], [*ends, len(numbers)], strict=True))
