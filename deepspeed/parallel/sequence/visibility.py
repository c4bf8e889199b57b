"""Visibility between tokens of a whole sequence, which attention masks of shards cannot express."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.ops.attention_blocks import CAUSAL, Mask


def documents_of(positions: Tensor) -> Tensor | None:
    """Numbers [batch, tokens] of the packed documents, from position ids [batch, tokens]: one begins where the
    position does not follow the one before. None if no row has two."""
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


@dataclass(frozen=True, eq=False, kw_only=True)
class Visibility:
    """A token sees another if they are in the same one of the ``documents`` [batch, tokens], the other is not padding
    (``valid`` [batch, tokens], bool), and, if ``causal``, not later and fewer than ``window`` tokens before."""

    causal: bool
    window: int | None = None
    documents: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ValueError("sequence parallelism has sliding windows for causal attention only")

    def is_plain(self, length: int) -> bool:
        """Return whether all ``length`` tokens are one document without padding and window."""
        return (
            self.documents is None and self.valid is None and (self.window is None or self.window >= length)
        )

    def mask(self, rows: range, columns: range, device: torch.device) -> Tensor | None:
        """Bool [batch or 1, 1, rows, columns]: which of these columns each of these rows sees. None: all."""
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
        if not parts:
            return None
        result = parts[0]
        for part in parts[1:]:
            result = result & part
        return result

    def block(self, rows: range, columns: range, device: torch.device) -> Mask:
        """``mask``, or CAUSAL where that says the same without one."""
        uncut = self.documents is None and self.valid is None and not self._cut(rows, columns)
        if self.causal and uncut and rows == columns:
            return CAUSAL
        return self.mask(rows, columns, device)

    def is_empty(self, rows: range, columns: range) -> bool:
        """Return whether order and window alone leave nothing to see."""
        if not self.causal:
            return False
        too_far = self.window is not None and columns.stop - 1 <= rows.start - self.window
        return columns.start > rows.stop - 1 or too_far

    def segments(self) -> list[list[tuple[int, int]]] | None:
        """For each row of the batch the bounds of its documents; None without documents, or with padding."""
        if self.documents is None or self.valid is not None:
            return None
        return [_runs(row) for row in self.documents.cpu()]

    def _cut(self, rows: range, columns: range) -> bool:
        return self.window is not None and columns.start <= rows.stop - 1 - self.window


def _runs(numbers: Tensor) -> list[tuple[int, int]]:
    ends = torch.nonzero(numbers[1:] != numbers[:-1]).flatten().add(1).tolist()
    return list(zip([0, *ends], [*ends, len(numbers)], strict=True))
