"""Which part of a vocabulary each rank of a group has, from what a script says of its own part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.untraced import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.sequence.exchange import communicator_of


@dataclass(frozen=True)
class VocabularyPart:
    """The words ``[first, first + own)`` of ``size``; the ranks of ``group`` hold the others."""

    group: Communicator
    first: int
    own: int
    size: int

    @property
    def run(self) -> tuple[int, int]:
        return self.first, self.size

    def check(self, words: Tensor, ignored: int, what: str = "target") -> None:
        """ValueError: a word that is in nobody's part. Waits for the device."""
        wrong = (words != ignored) & ((words < 0) | (words >= self.size))
        if bool(wrong.any()):
            raise ValueError(
                f"{what} {int(words[wrong][0])} is out of range for vocabulary size {self.size} "
                f"(ignore_index is {ignored})"
            )


@untraced
def vocabulary_part(
    own: int,
    group: Any,
    start: int | None = None,
    end: int | None = None,
    size: int | None = None,
    *,
    device: torch.device,
) -> VocabularyPart:
    """The part of this rank, which has ``own`` words. Collective, unless ``size`` is given or there is one rank.

    Args:
        group: the ranks that share the vocabulary; None: one rank.
        start, end: of the own part; both or neither. Without them parts lie in rank order.
        size: of the whole vocabulary; then ``start`` and ``end`` are believed.

    ValueError, on every rank: the parts are no partition of a vocabulary in rank order.
    """
    if (start is None) != (end is None):
        raise ValueError("vocab_start_index and vocab_end_index belong together: give both, or neither")
    comm = communicator_of(group)
    if size is not None:
        if start is None:
            raise ValueError("global_vocab_size needs vocab_start_index and vocab_end_index as well")
        return VocabularyPart(comm, start, own, size)
    everyone = _facts(comm, (own, -1 if start is None else start, -1 if end is None else end), device)
    first = 0
    for rank, (words, its_start, its_end) in enumerate(everyone):
        if not words:
            raise ValueError(
                f"rank {rank} of the group has no word: use at most as many ranks as there are words"
            )
        if its_start >= 0 and (its_start, its_end) != (first, first + words):
            raise ValueError(
                f"rank {rank} of the group says that its {words} words are [{its_start}, {its_end}), but parts in rank "
                f"order without gaps give it [{first}, {first + words}): correct vocab_start_index and vocab_end_index"
            )
        first += words
    return VocabularyPart(comm, sum(words for words, _, _ in everyone[: comm.rank]), own, first)


def _facts(comm: Communicator, mine: tuple[int, ...], device: torch.device) -> list[list[int]]:
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    if comm.size == 1:
        return [list(mine)]
    everyone = torch.empty(comm.size, len(mine), dtype=torch.int64, device=device)
    comm.all_gather(everyone, own).wait()
    return everyone.tolist()
