"""Bytes sent within a host and across: the two kinds of links that a step pays for.

Transports count what they move: gloo every message, by whether the peer is on this host, shared memory what the other
ranks of the host read of this one's. Of a collective that somebody else carries out (NCCL) only the payload is known:
it counts as if each pair of ranks exchanged its share directly.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that one rank has sent."""

    within: int = 0
    across: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.within + other.within, self.across + other.across)

    def __sub__(self, other: Sent) -> Sent:
        return Sent(self.within - other.within, self.across - other.across)

    @classmethod
    def spread(cls, nbytes: int, far_share: float) -> Sent:
        across = round(nbytes * far_share)
        return cls(nbytes - across, across)


def far_share(ranks: Sequence[int], rank: int, blocks: Sequence[Sequence[int]] | None) -> float:
    """Return the share of the group's other ranks that are on other hosts. ``ranks``: all of them, by global number;
    ``rank``: this one within the group; ``blocks``: ranks within the group by host, None: as LOCAL_WORLD_SIZE says."""
    if len(ranks) < 2:
        return 0.0
    if blocks is not None:
        near = next(len(block) for block in blocks if rank in block)
    else:
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(ranks) + 1
        near = sum(other // per_host == ranks[rank] // per_host for other in ranks)
    return (len(ranks) - near) / (len(ranks) - 1)
