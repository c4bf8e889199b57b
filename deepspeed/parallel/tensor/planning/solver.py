"""Solver from labels to cuts: assigns channel groups to ranks where possible, and keeps the rest whole.

A *region* is a set of weights between a copy of the whole input and a sum of products: the projections of one
attention, the matrices of one MLP. It is split if its channels form at least as many independent groups as there are
ranks, and all of them end in the sum. Otherwise one of its column layers is kept whole, and labels are propagated
again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from deepspeed.checkpoint.shards import Interval
from deepspeed.parallel.tensor.cuts import Cut, even_sizes
from deepspeed.parallel.tensor.planning.labels import NONE, Labels
from deepspeed.parallel.tensor.planning.plan import PlanError
from deepspeed.parallel.tensor.planning.propagation import propagate_labels
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import LabelledGraph

_ATTEMPTS = 40
Axis = tuple[str, int]


@dataclass(slots=True)
class SplitRegion:
    """A region. ``columns``, ``rows``, ``others``: dims of parameters. ``groups``: independent groups of channels, by
    smallest label, in the order of the row layer's inputs. ``stray``: some channels feed no row layer."""

    columns: list[Axis] = field(default_factory=list)
    rows: list[Axis] = field(default_factory=list)
    others: list[Axis] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    fewest: int = 0
    """Minimum number of groups over the row layers."""
    forbidden: bool = False
    stray: bool = False
    cuts: dict[Axis, Cut] = field(default_factory=dict)
    arguments: dict[str, Cut] = field(default_factory=dict)
    """Cuts of module arguments along one dim; size is the period with which parts repeat (heads of each example)."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The ``regions`` to split. ``whole``: weights of linear layers that stay whole -> why."""

    regions: list[SplitRegion]
    whole: dict[str, str]
    labelled: LabelledGraph
    sharable: dict[Axis, Tensor]


def solve(trace: Trace, ranks: int, *, whole: Mapping[str, str], grain: int = 1) -> Solution:
    """Find what ``ranks`` ranks can split. ``whole``: parameters that must stay whole, and why. ``grain``: independent
    channels are assigned in multiples of this if possible."""
    reasons = dict(whole)
    sharable: dict[Axis, Tensor] = {}
    arguments: set[str] = set()
    for _ in range(_ATTEMPTS):
        labelled = propagate_labels(trace, reasons, sharable, arguments)
        attempt = _Attempt(labelled, labelled.labels.components(), sharable, arguments, ranks, grain)
        regions = attempt.regions()
        changed = False
        failing: list[str] = []
        for region in regions:
            both = [name for name in _names(region) if name in labelled.used_whole and name not in reasons]
            if both:
                changed = True
                reasons |= dict.fromkeys(both, "it is also used whole")
                continue
            problem = _problem(region, ranks) or attempt.assign(region)
            chosen = attempt.retry(region) if problem is not None else None
            if problem is not None and chosen is not None:
                changed = True
                if chosen:
                    failing.append(chosen)
                    reasons[chosen] = problem
        _extend(failing, regions, reasons)
        if not changed:
            good = [region for region in regions if region.cuts]
            return Solution(good, {name: why for name, why in reasons.items() if why}, labelled, sharable)
    raise PlanError(f"no plan was found in {_ATTEMPTS} attempts")


def _names(region: SplitRegion) -> list[str]:
    return list(dict.fromkeys(axis[0] for axis in (*region.columns, *region.rows, *region.others)))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt to split a labelled graph over ``ranks``. ``roots``: the smallest label that each one is united with.
    ``sharable``, ``arguments``: what ranks may share, and which arguments may be cut; ``retry`` adds to them."""

    labelled: LabelledGraph
    roots: Tensor
    sharable: dict[Axis, Tensor]
    arguments: set[str]
    ranks: int
    grain: int

    def groups(self, axis: Axis) -> Tensor:
        """Return the group of each channel along a dim of a parameter."""
        return self.roots[self.labelled.axis_labels[axis]]

    def regions(self) -> list[SplitRegion]:
        """Collect weights that share groups of channels. Weights with only shared channels join the regions that need
        them."""
        labelled, roots = self.labelled, self.roots
        linked = Labels()
        linked.fresh(len(roots) - NONE - 1)
        for axis in labelled.axis_labels:
            own = self.groups(axis)
            if len(own) and (axis[0] in labelled.columns or axis[0] in labelled.rows):
                linked.unite(own[:1], own)
        for pairs in labelled.labels.followers:
            linked.unite(*roots[pairs])
        at = linked.components()
        forbidden = roots[torch.cat([torch.zeros(1, dtype=torch.int64), *labelled.labels.forbidden])]
        table: dict[int, SplitRegion] = defaultdict(SplitRegion)
        for axis in labelled.axis_labels:
            if axis[0] in labelled.arguments:
                continue
            own = self.groups(axis)
            region = table[int(at[own[0]])]
            region.forbidden |= bool(torch.isin(own, forbidden).any())
            if labelled.columns.get(axis[0]) == axis[1]:
                region.columns.append(axis)
            elif labelled.rows.get(axis[0]) == axis[1]:
                region.rows.append(axis)
            else:
                region.others.append(axis)
        for name in labelled.arguments:
            for key in torch.unique(at[self.groups((name, 0))]).tolist():
                if key in table:
                    table[key].others.append((name, 0))
        found = [region for region in table.values() if region.columns or region.rows]
        for region in found:
            self._order(region)
        return found

    def _order(self, region: SplitRegion) -> None:
        """Set the groups of a region, their least number, and whether some feed no row layer."""
        of_rows = [self.groups(axis).tolist() for axis in region.rows]
        region.groups = list(dict.fromkeys(chain.from_iterable(of_rows)))
        region.fewest = min((len(set(groups)) for groups in of_rows), default=0)
        known = torch.tensor(sorted(region.groups))
        for axis in region.columns:
            own = self.groups(axis)
            hard = own[~self.sharable[axis]] if axis in self.sharable else own
            region.stray |= not bool(torch.isin(hard, known).all())

    def retry(self, region: SplitRegion) -> str | None:
        """Change one thing for the next attempt: cut arguments or let ranks share channels (returns ""), or return the
        weight to keep whole: the narrowest of the region (a bottleneck, such as an adapter's). None: nothing is
        left."""
        if not region.columns:
            return None
        mine = torch.cat([self.groups(axis) for axis in region.columns])
        met = {name for labels, name in self.labelled.met if torch.isin(self.roots[labels], mine).any()}
        if region.rows and met - self.arguments:
            self.arguments.update(met)
            return ""
        tried = any(axis in self.sharable for axis in region.columns)
        if region.rows and not tried and self._make_sharable(region):
            return ""
        for axis in region.columns:
            self.sharable.pop(axis, None)
        return min(region.columns, key=lambda axis: len(self.labelled.axis_labels[axis]))[0]

    def _make_sharable(self, region: SplitRegion) -> bool:
        """Let several ranks hold the channels that the forward copies (keys and values of grouped heads)."""
        axes, axis_labels, sharable = (
            [*region.columns, *region.others],
            self.labelled.axis_labels,
            self.sharable,
        )
        made: dict[Axis, Tensor] = {}
        for united, ids in self.labelled.copied:
            if not any(bool(torch.isin(axis_labels[axis], ids).any()) for axis in axes):
                continue
            early = self.labelled.labels.components(united)
            shared = torch.unique(early[ids])
            for axis in axes:
                mask = torch.isin(early[axis_labels[axis]], shared)
                known = sharable.get(axis, torch.zeros_like(mask))
                if (mask & ~known).any():
                    made[axis] = mask | made.get(axis, known)
        # Nothing would be left to assign.
        if all(axis in made and bool(made[axis].all()) for axis in region.columns):
            return False
        sharable.update(made)
        return bool(made)

    def assign(self, region: SplitRegion) -> str | None:
        """Assign the groups to ranks, and cut every parameter accordingly. Returns the obstacle, or None."""
        needs = self._needs(region)
        own = self._shares(region, needs)
        if own is None:
            return "its shared heads cannot be distributed evenly"
        holders = torch.zeros(self.ranks, len(self.roots), dtype=torch.bool)
        for rank, groups in enumerate(own):
            followers = {each for group in groups for each in needs.get(group, ())}
            holders[rank, torch.tensor([*groups, *followers])] = True
        for axis in [*region.columns, *region.rows, *region.others]:
            own_roots = self.groups(axis)
            held = holders[:, own_roots]
            if axis[0] in self.labelled.arguments:
                shape = self.labelled.arguments[axis[0]]
                used = torch.isin(own_roots, torch.tensor(region.groups)).view(shape)
                problem = _cut_argument(region, axis[0], held.view(self.ranks, *shape), used)
                if problem is not None:
                    region.cuts.clear()
                    return problem
            elif bool(held.any(0).all()):
                region.cuts[axis] = Cut(axis[1], held.shape[1], _parts(held))
            elif axis not in region.others:
                region.cuts.clear()
                return "some of its channels are used elsewhere"
        return None

    def _needs(self, region: SplitRegion) -> dict[int, tuple[int, ...]]:
        """Map each group to the shared groups that it needs."""
        known = set(region.groups)
        found: dict[int, set[int]] = defaultdict(set)
        for pairs in self.labelled.labels.followers:
            for group, shared in torch.unique(self.roots[pairs], dim=1).T.tolist():
                if group in known:
                    found[group].add(shared)
        return {group: tuple(sorted(shared)) for group, shared in found.items()}

    def _shares(self, region: SplitRegion, needs: dict[int, tuple[int, ...]]) -> list[list[int]] | None:
        """Return the groups of each rank: consecutive, and as even in number as possible. Groups that need the same
        shared ones get separate ranks. None: there are more such families than ranks, or too few groups in one."""
        ranks, grain = self.ranks, self.grain
        if not needs:
            count = len(region.groups)
            single = all(len(self.labelled.axis_labels[axis]) == count for axis in region.rows)
            unit = grain if single and count % grain == 0 and count // grain >= ranks else 1
            return _runs(region.groups, even_sizes(count, ranks, unit))
        families: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for group in region.groups:
            families[needs.get(group, ())].append(group)
        if len(families) > ranks:
            return None
        shares: list[list[int]] = []
        for members, count in zip(families.values(), even_sizes(ranks, len(families)), strict=True):
            if len(members) < count:
                return None
            shares += _runs(members, even_sizes(len(members), count))
        return shares


def _problem(region: SplitRegion, ranks: int) -> str | None:
    if region.forbidden:
        return "its channels are combined in one operation"
    if not region.rows:
        return "no later layer consumes its channels"
    if region.stray:
        return "some of its channels are used elsewhere"
    if region.fewest < 2:
        return "its channels depend on each other"
    if region.fewest < ranks:
        return f"it has {region.fewest} independent groups of channels for {ranks} ranks"
    return None


def _extend(failing: Sequence[str], regions: Sequence[SplitRegion], reasons: dict[str, str]) -> None:
    """Keep whole the counterparts of failing layers in other blocks that cannot be split either, to save attempts."""
    kinds = {kind_of(name): reasons[name] for name in failing}
    for region in regions:
        if not region.cuts:
            for name, _ in [*region.columns, *region.rows]:
                if kind_of(name) in kinds:
                    reasons.setdefault(name, kinds[kind_of(name)])


def kind_of(name: str) -> str:
    """Return a name with block indices masked: equal for counterparts in all blocks."""
    return re.sub(r"\d+", "#", name)


def _cut_argument(region: SplitRegion, name: str, held: Tensor, used: Tensor) -> str | None:
    """Cut an argument along one dim. ``held`` [ranks, *shape]: elements of each rank, among those ``used`` [*shape].
    Returns the obstacle, or None."""
    for dim in range(used.ndim):
        mine, some = held.movedim(dim + 1, 1).flatten(2), used.movedim(dim, 0).flatten(1)
        own = (mine & some).any(2)
        if not bool(((mine == own[..., None]) | ~some).all()) or not bool(some.any(1).all()):
            continue
        size = own.shape[1]
        period = next(n for n in range(1, size + 1) if size % n == 0 and torch.equal(own[:, n:], own[:, :-n]))
        region.arguments[name] = Cut(dim, period, _parts(own[:, :period]))
        return None
    return f"its part of the argument {name} is not along one dim"


def _runs(items: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    found, position = [], 0
    for size in sizes:
        found.append(list(items[position : position + size]))
        position += size
    return found


def _parts(held: Tensor) -> tuple[tuple[Interval, ...], ...]:
    """Return the intervals that each rank holds, by ``held`` [ranks, size]."""
    return tuple(intervals_of(mask.nonzero()[:, 0]) for mask in held)


def intervals_of(positions: Tensor) -> tuple[Interval, ...]:
    """Merge positions [n], in this order, into as few intervals as possible."""
    if not len(positions):
        return ()
    breaks = (torch.diff(positions) != 1).nonzero().flatten().add(1).tolist()
    edges = [0, *breaks, len(positions)]
    return tuple(
        (int(positions[start]), int(positions[end - 1]) + 1)
        for start, end in zip(edges, edges[1:], strict=False)
    )
