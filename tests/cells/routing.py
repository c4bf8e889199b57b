"""What an engine chose, for the oracle to follow: experts, of which 16 bits turn choices that are nearly tied, and the
tokens that random-LTD keeps.

The oracle trains on with the engine's choices, so that what an expert learns can be compared within the limits of
everything else; how much smaller the probability of each such choice is than that of the oracle's own is limited too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.tracing import untraced
from tests.cells.cell import BATCH, Cell

NEARLY_TIED = {"fp32": 1e-3, "fp16": 0.02}
SIXTEEN_BITS, FEW_BITS = 0.05, 0.2
"""The latter for each run of ``STEPS`` updates: where nothing is left of a gradient, a weight does not go its way of up
to a rate, and so again with each update. (Two rows of a router that differ by a rate in every weight, at random, give a
token of norm 4 logits that differ by 4 x 2^0.5 x 0.01 = 0.057.) By SGD, whose ways are as small as such gradients, the
same choices differ by 1e-3."""


def nearly_tied(cell: Cell, layouts: int = 1) -> float:
    """By how much logits of two choices that change places may differ, in a run of as many layouts."""
    lossy = cell.wire not in ("plain", "fp32") or cell.fp8 or cell.optimizer == "8-bit"
    return FEW_BITS * layouts if lossy else NEARLY_TIED.get(cell.precision, SIXTEEN_BITS)


@contextlib.contextmanager
def noted(choices: list[Tensor], kept: list[Tensor]) -> Iterator[None]:
    """Adds the experts [tokens, 2] of every forward of a gate to ``choices``, and the tokens [batch, n] that a layer
    keeps in every forward to ``kept``; not those of recomputations."""
    from deepspeed.data.data_routing.sampling import TokenSampler
    from deepspeed.parallel.expert.sharded_moe import TopKGate

    routes, draw = TopKGate.routes, TokenSampler.draw

    @untraced
    def note(found: Tensor, notes: list[Tensor]) -> None:
        if torch._C._current_graph_task_id() == -1:  # not in a backward
            notes.append(found.clone())

    def noting(self: TopKGate, *args: Any) -> Any:
        found = routes(self, *args)
        note(found.experts, choices)
        return found

    @untraced
    def drawing(self: TokenSampler, *args: Any) -> Tensor:
        note(found := draw(self, *args), kept)
        return found

    TopKGate.routes, TokenSampler.draw = noting, drawing  # type: ignore[method-assign]
    try:
        yield
    finally:
        TopKGate.routes, TokenSampler.draw = routes, draw  # type: ignore[method-assign]


def place_of(cell: Cell, rank: int) -> tuple[int, int]:
    """Return the data stream that a rank reads, and its part of the sequences. Pipelines are outermost, then data,
    sequences, layers."""
    parts = rank % (cell.ranks // cell.axis("pp")) // cell.axis("tp")
    return parts // cell.axis("sp"), parts % cell.axis("sp")


def by_place(cell: Cell, notes: list[list[Tensor]]) -> dict[tuple[int, int], list[Tensor]]:
    """Merge the records of ranks, by their tokens. ValueError: ranks with the same tokens chose differently."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for rank, own in enumerate(notes):
        if own:
            first = found.setdefault(place_of(cell, rank), own)
            if len(first) != len(own) or not all(map(torch.equal, first, own)):
                raise ValueError(
                    f"rank {rank} routes its tokens otherwise than a rank that has the same ones"
                )
    return found


def by_replica(cell: Cell, choices: list[list[Tensor]]) -> list[list[Tensor]]:
    """The choices [tokens, 2] of each stream's forwards, from what each rank noted. ValueError as of ``by_place``."""
    found = by_place(cell, choices)
    if not found:  # no mixture
        return []
    every = []
    for replica in range(cell.replicas):
        parts = zip(*(found[replica, part] for part in range(cell.axis("sp"))), strict=True)
        every.append([torch.cat([each.view(BATCH, -1, 2) for each in both], 1).view(-1, 2) for both in parts])
    return every


def kept_by_replica(cell: Cell, kept: list[list[Tensor]]) -> list[list[Tensor]]:
    """The tokens that the first layer worked on in each stream's forwards. ValueError as of ``by_place``."""
    found = by_place(cell, kept)
    return [found.get((replica, 0), []) for replica in range(cell.replicas)]


def doubt(chances: Tensor, chosen: Tensor) -> float:
    """The largest logarithm of how many times as probable [tokens, experts] the best choices are as the ``chosen`` ones
    [tokens, 2]; 0 where they are the same."""
    chances = chances.detach()
    return float((chances.topk(2, 1).values.log() - chances.gather(1, chosen).log()).max())
