"""Load of a collective on each link, and its cost on the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepspeed.planning.step_time.events import Link
from deepspeed.planning.step_time.hardware import NetworkSpec

INSIDE, BETWEEN = "inside", "between"
"""Resources: the links within a node, and the link between a node and the others."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a collective, ``per_node`` of them on each node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // max(1, self.per_node))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a collective on its ranks. ``start``: seconds, by operation. ``byte``: seconds per byte that a rank
    sends, if the link is not the limit; ``sum``: additional seconds per byte to add up, on the waiting thread."""

    start: Mapping[str, float] = field(default_factory=dict)
    byte: float = 0.0
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Transmission:
    """A part of a collective: bytes that a link carries, latency in seconds before, and seconds of work on the ranks
    after it."""

    resource: str
    nbytes: float
    latency: float
    work: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Links and costs of a job. ``background``: the second part of a two-part collective starts by itself (as on
    devices); else when the thread waits for it (gloo). ``crowded``: share of a link's rate that is reached if more than
    two nodes send to all others at once."""

    ranks_per_node: int
    between: NetworkSpec
    inside: NetworkSpec
    costs: Costs = Costs()
    background: bool = True
    crowded: float = 1.0

    def resources(self) -> dict[str, Link]:
        """Return fresh links, for one simulation."""
        return {
            INSIDE: self._link(self.inside, self.ranks_per_node if self.inside.per_device else 1),
            BETWEEN: self._link(self.between, self.ranks_per_node if self.between.per_device else 1),
        }

    def _link(self, network: NetworkSpec, devices: int) -> Link:
        # A node's ranks send concurrently: the rate that each of them reaches limits the node's link, too.
        rate = network.payload_rate * devices
        most = self.ranks_per_node / self.costs.byte if self.costs.byte else float("inf")
        peak = min(network.peak or rate, most)
        return Link(min(rate, most), network.burst, max(peak, min(rate, most)))

    def parts(self, operation: str, nbytes: float, group: RankGroup) -> list[Transmission]:
        """Return the transmissions of a collective over a full buffer of ``nbytes``."""
        if group.ranks <= 1 or nbytes <= 0:
            return []
        start = self.costs.start.get(operation, 0.0)
        if operation == "all_reduce":
            first = self._transmission(nbytes, group, start / 2, self.costs.sum)
            return [first, self._transmission(nbytes, group, start / 2, 0.0)]
        work = self.costs.sum if operation == "reduce_scatter" else 0.0
        if operation == "broadcast":
            hops = math.ceil(math.log2(group.ranks))
            return [self._transmission(nbytes * group.ranks / (group.ranks - 1), group, start * hops, 0.0)]
        fetched = operation == "fetch"
        direct = fetched or operation == "all_to_all"
        return [self._transmission(nbytes, group, start, work, direct=direct, fetched=fetched)]

    def _transmission(
        self,
        nbytes: float,
        group: RankGroup,
        start: float,
        work: float,
        *,
        direct: bool = False,
        fetched: bool = False,
    ) -> Transmission:
        """Build a transmission. ``direct``: all ranks exchange pairwise, without reducing traffic within a node first.
        ``fetched``: ranks fetch at different times, so that links are not crowded."""
        own = nbytes * (group.ranks - 1) / group.ranks
        network = self.between if group.nodes > 1 else self.inside
        latency = start + network.latency
        reached = self.crowded if group.nodes > 2 and not fetched else 1.0
        if group.nodes == 1:
            return Transmission(INSIDE, own * self.ranks_per_node, latency, work * own)
        beside = max(1, self.ranks_per_node // max(1, group.per_node))  # groups that share the node's link
        leaving = nbytes * (group.nodes - 1) / group.nodes * beside * (group.per_node if direct else 1)
        return Transmission(BETWEEN, leaving / reached, latency, work * own)

    def point_to_point(self, nbytes: float, stride: int) -> float:
        """Return the seconds to send to the next pipeline stage, if ``stride`` ranks work on the same samples: within
        the node if it holds all of them. A node's ranks send concurrently."""
        near = stride <= self.ranks_per_node
        network = self.inside if near else self.between
        rate = network.payload_rate / (1 if network.per_device else self.ranks_per_node)
        return network.latency + nbytes / rate
