"""Join the prompts of several ranks into one batch, and hand each rank its share of the output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator


class JoinedPrompts:
    """The prompts of all ranks of ``group``, in rank order, padded on the left to one width.

    The ranks give the same settings; prompts may differ in number and width. Collective.

    Args:
        prompts: [rows, width], integers.
        mask: [rows, width], 0 for padding; None: no padding.
        padding: token for left padding.
        batch_per_rank: make one batch per rank, of the width of its prompts, for models in which a row depends on the
            rest of its batch (``Rotations``).

    Attributes:
        batches: (tokens, mask) of each batch, both [rows of all ranks, widest] int64.
    """

    def __init__(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        padding: int,
        group: Communicator,
        *,
        batch_per_rank: bool = False,
    ) -> None:
        self._rows, self._width = prompts.shape
        sizes = _gathered(torch.tensor([self._rows, self._width], device=prompts.device), group)
        counts, widths = sizes[:, 0].tolist(), sizes[:, 1].tolist()
        self._widest, most = max(widths), max(counts)
        self._before, self._total = sum(counts[: group.rank]), sum(counts)
        both = prompts.new_zeros((2, most, self._widest), dtype=torch.int64)
        both[0] = padding
        both[0, : self._rows, self._widest - self._width :] = prompts
        both[1, : self._rows, self._widest - self._width :] = 1 if mask is None else mask
        everyone = _gathered(both.flatten(), group).view(group.size, 2, most, self._widest)
        ranks = [each[:, :count] for each, count in zip(everyone, counts, strict=True)]
        if batch_per_rank:
            batches = [each[:, :, -width:] for each, width in zip(ranks, widths, strict=True)]
            self._batch, self._before, self._total, self._widest = group.rank, 0, self._rows, self._width
        else:
            batches, self._batch = [torch.cat(ranks, 1)], 0
        self.batches = [(tokens, shown) for tokens, shown in batches]

    def own(self, answers: Sequence[Tensor], ends: set[int]) -> Tensor:
        """Return this rank's rows of ``answers`` (per batch [rows * answers per row, length]), without columns that are
        only needed for wider prompts or longer answers of other ranks."""
        tokens = answers[self._batch]
        each = tokens.shape[0] // self._total
        rows = tokens[self._before * each : (self._before + self._rows) * each]
        rows = rows[:, self._widest - self._width :]
        return rows[:, : self._width + _longest(rows[:, self._width :], ends)]


def _longest(answers: Tensor, ends: set[int]) -> int:
    """Return the number of columns until every row has ended."""
    ended = torch.isin(answers, torch.tensor(sorted(ends), dtype=answers.dtype, device=answers.device))
    first = torch.where(ended.any(1), ended.int().argmax(1) + 1, answers.shape[1])
    return int(first.max()) if answers.numel() else 0


def _gathered(flat: Tensor, group: Communicator) -> Tensor:
    """All-gather ``flat`` [n] into [ranks, n]."""
    output = flat.new_empty(group.size * flat.numel())
    group.all_gather(output, flat.contiguous()).wait()
    return output.view(group.size, -1)
