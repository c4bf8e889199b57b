"""Count bytes sent within a host and across hosts.

Transports count their traffic: gloo every message, by whether the peer is on this host; shared memory the bytes that
other ranks of the host read from this one. For external collectives (NCCL) only the payload is known: it counts as if
each pair of ranks exchanged its share directly.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BytesSent:
    """Bytes sent by one rank, within its host and across hosts."""

    within: int = 0
    across: int = 0

    def __add__(self, other: BytesSent) -> BytesSent:
        return BytesSent(self.within + other.within, self.across + other.across)

    def __sub__(self, other: BytesSent) -> BytesSent:
        return BytesSent(self.within - other.within, self.across - other.across)

    @classmethod
    def split(cls, nbytes: int, far_share: float) -> BytesSent:
        across = round(nbytes * far_share)
        return cls(nbytes - across, across)


def far_share(ranks: Sequence[int], rank: int, blocks: Sequence[Sequence[int]] | None) -> float:
    """Return the share of the group's other ranks that are on other hosts. ``ranks``: global ranks of the group;
    ``rank``: this one's group rank; ``blocks``: group ranks by host, None: derived from LOCAL_WORLD_SIZE."""
    if len(ranks) < 2:
        return 0.0
    if blocks is not None:
        near = next(len(block) for block in blocks if rank in block)
    else:
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(ranks) + 1
        near = sum(other // per_host == ranks[rank] // per_host for other in ranks)
    return (len(ranks) - near) / (len(ranks) - 1)
