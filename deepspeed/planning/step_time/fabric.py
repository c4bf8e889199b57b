"""Load of a collective on each link, and what it costs the ranks besides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepspeed.planning.step_time.events import Link
from deepspeed.planning.step_time.hardware import NetworkSpec

INSIDE, BETWEEN = "inside", "between"
"""Resources: the links within a node, and the link of a node to the others."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that communicate: ``per_node`` of them are on the same node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // max(1, self.per_node))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a collective on its ranks. ``start``: seconds, by operation. ``byte``: seconds per byte that a rank
    sends, where nothing but the ranks limits it; ``sum``: what adding up costs besides, on the thread that waits."""

    start: Mapping[str, float] = field(default_factory=dict)
    byte: float = 0.0
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Transmission:
    """A part of a collective: bytes that a link carries, seconds before, and seconds that the ranks work after it."""

    resource: str
    nbytes: float
    latency: float
    work: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """``ranks_per_node`` of the whole job. ``background``: a collective of two parts does not need the thread that
    waits between them (as on devices); else the second begins when somebody waits (gloo). ``crowded``: the share of a
    link that is reached where more than two nodes all send to all others at once."""

    ranks_per_node: int
    between: NetworkSpec
    inside: NetworkSpec
    costs: Costs = Costs()
    background: bool = True
    crowded: float = 1.0

    def resources(self) -> dict[str, Link]:
        """Fresh links, for one simulation."""
        return {
            INSIDE: self._link(self.inside, self.ranks_per_node if self.inside.per_device else 1),
            BETWEEN: self._link(self.between, self.ranks_per_node if self.between.per_device else 1),
        }

    def _link(self, network: NetworkSpec, devices: int) -> Link:
        # A node's ranks send at the same time: what one of them can send limits the node's link too.
        rate = network.payload_rate * devices
        most = self.ranks_per_node / self.costs.byte if self.costs.byte else float("inf")
        peak = min(network.peak or rate, most)
        return Link(min(rate, most), network.burst, max(peak, min(rate, most)))

    def parts(self, operation: str, nbytes: float, group: RankGroup) -> list[Transmission]:
        """The transmissions of a collective over ``nbytes`` in all."""
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
        """``direct``: every rank exchanges with every other, those of a node not first among themselves. ``fetched``:
        each asks when it wants to, so that not all meet."""
        own = nbytes * (group.ranks - 1) / group.ranks
        network = self.between if group.nodes > 1 else self.inside
        latency = start + network.latency
        reached = self.crowded if group.nodes > 2 and not fetched else 1.0
        if group.nodes == 1:
            return Transmission(INSIDE, own * self.ranks_per_node, latency, work * own)
        beside = max(1, self.ranks_per_node // max(1, group.per_node))  # other groups share the node's link
        leaving = nbytes * (group.nodes - 1) / group.nodes * beside * (group.per_node if direct else 1)
        return Transmission(BETWEEN, leaving / reached, latency, work * own)

    def point_to_point(self, nbytes: float, apart: int) -> float:
        """Seconds to send to the next stage, where ``apart`` ranks work on the same samples: within the node if all of
        them are there. The others of the node send at the same time."""
        near = apart <= self.ranks_per_node
        network = self.inside if near else self.between
        rate = network.payload_rate / (1 if network.per_device else self.ranks_per_node)
        return network.latency + nbytes / rate
