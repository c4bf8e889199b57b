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

import torch
from torch import Tensor

from deepspeed.parallel.tensor.cuts import Cut, even_sizes
from deepspeed.parallel.tensor.planning.labels import NONE, Labels
from deepspeed.parallel.tensor.planning.plan import PlanError
from deepspeed.parallel.tensor.planning.propagation import propagate_labels
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import LabelledGraph, SharableChannels

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
        roots = labelled.labels.components()
        regions = _regions(labelled, roots, sharable)
        changed = False
        failing: list[str] = []
        for region in regions:
            both = [name for name in _names(region) if name in labelled.used_whole and name not in reasons]
            if both:
                changed = True
                reasons |= dict.fromkeys(both, "it is also used whole")
                continue
            problem = _problem(region, ranks)
            if problem is None:
                problem = _assign(region, labelled, roots, sharable, ranks, grain)
            if problem is None:
                continue
            chosen = _retry(region, labelled, roots, sharable, arguments)
            if chosen is not None:
                changed = True
                if chosen:
                    failing.append(chosen)
                    reasons[chosen] = problem
        _extend(failing, regions, ranks, reasons)
        if not changed:
            good = [region for region in regions if region.cuts]
            return Solution(good, {name: why for name, why in reasons.items() if why}, labelled, sharable)
    raise PlanError(f"no plan was found in {_ATTEMPTS} attempts")


def _names(region: SplitRegion) -> list[str]:
    return list(dict.fromkeys(axis[0] for axis in (*region.columns, *region.rows, *region.others)))


def _regions(labelled: LabelledGraph, roots: Tensor, sharable: SharableChannels) -> list[SplitRegion]:
    """Collect weights that share groups of channels. Weights with only shared channels join the regions that need
    them."""
    linked = Labels()
    linked.fresh(len(roots) - NONE - 1)
    for axis, labels in labelled.axis_labels.items():
        own = roots[labels]
        if len(own) and (axis[0] in labelled.columns or axis[0] in labelled.rows):
            linked.unite(own[:1], own)
    for pairs in labelled.labels.followers:
        ends = roots[pairs]
        linked.unite(ends[0], ends[1])
    at = linked.components()
    forbidden = roots[torch.cat([torch.zeros(1, dtype=torch.int64), *labelled.labels.forbidden])]
    table: dict[int, SplitRegion] = defaultdict(SplitRegion)
    for axis, labels in labelled.axis_labels.items():
        own = roots[labels]
        if axis[0] in labelled.arguments:
            continue
        region = table[int(at[own[0]])]
        region.forbidden |= bool(torch.isin(own, forbidden).any())
        if labelled.columns.get(axis[0]) == axis[1]:
            region.columns.append(axis)
        elif labelled.rows.get(axis[0]) == axis[1]:
            region.rows.append(axis)
        else:
            region.others.append(axis)
    for name in labelled.arguments:
        for key in torch.unique(at[roots[labelled.axis_labels[name, 0]]]).tolist():
            if key in table:
                table[key].others.append((name, 0))
    found = [region for region in table.values() if region.columns or region.rows]
    for region in found:
        order: dict[int, None] = {}
        for axis in region.rows:
            order.update(dict.fromkeys(roots[labelled.axis_labels[axis]].tolist()))
        region.groups = list(order)
        region.fewest = min(
            (len(torch.unique(roots[labelled.axis_labels[axis]])) for axis in region.rows), default=0
        )
        known = torch.tensor(sorted(order))
        for axis in region.columns:
            own = roots[labelled.axis_labels[axis]]
            hard = own[~sharable[axis]] if axis in sharable else own
            region.stray |= not bool(torch.isin(hard, known).all())
    return found


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


def _retry(
    region: SplitRegion,
    labelled: LabelledGraph,
    roots: Tensor,
    sharable: dict[Axis, Tensor],
    arguments: set[str],
) -> str | None:
    """Change one thing for the next attempt: cut arguments or let ranks share channels (returns ""), or return the
    weight to keep whole: the narrowest of the region (a bottleneck, such as an adapter's). None: nothing is left."""
    if not region.columns:
        return None
    mine = roots[torch.cat([labelled.axis_labels[axis] for axis in region.columns])]
    met = {name for labels, name in labelled.met if torch.isin(roots[labels], mine).any()}
    if region.rows and met - arguments:
        arguments |= met
        return ""
    tried = any(axis in sharable for axis in region.columns)
    if region.rows and not tried and _make_sharable(region, labelled, sharable):
        return ""
    for axis in region.columns:
        sharable.pop(axis, None)
    return min(region.columns, key=lambda axis: len(labelled.axis_labels[axis]))[0]


def _extend(
    failing: Sequence[str], regions: Sequence[SplitRegion], ranks: int, reasons: dict[str, str]
) -> None:
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


def _make_sharable(region: SplitRegion, labelled: LabelledGraph, sharable: dict[Axis, Tensor]) -> bool:
    """Let several ranks hold the channels that the forward copies (keys and values of grouped heads)."""
    axes = [*region.columns, *region.others]
    labels = labelled.labels
    made: dict[Axis, Tensor] = {}
    for united, ids in labelled.copied:
        mine = [axis for axis in axes if bool(torch.isin(labelled.axis_labels[axis], ids).any())]
        if not mine:
            continue
        early = labels.components(united)
        shared = torch.unique(early[ids])
        for axis in axes:
            mask = torch.isin(early[labelled.axis_labels[axis]], shared)
            if mask.any() and not (
                axis in sharable and bool((sharable[axis] | mask == sharable[axis]).all())
            ):
                made[axis] = mask | made.get(axis, sharable.get(axis, torch.zeros_like(mask)))
    # Nothing would be left to assign.
    if all(axis in made and bool(made[axis].all()) for axis in region.columns):
        return False
    sharable |= made
    return bool(made)


def _assign(
    region: SplitRegion,
    labelled: LabelledGraph,
    roots: Tensor,
    sharable: SharableChannels,
    ranks: int,
    grain: int,
) -> str | None:
    """Assign the groups to ranks, and cut every parameter accordingly. Returns the obstacle, or None."""
    needs = _needs(region, labelled, roots)
    own = _shares(region, needs, ranks, grain, labelled, roots)
    if own is None:
        return "its shared heads cannot be distributed evenly"
    holders = torch.zeros(ranks, len(roots), dtype=torch.bool)
    for rank, groups in enumerate(own):
        holders[rank, torch.tensor(groups)] = True
        followers = sorted({each for group in groups for each in needs.get(group, ())})
        if followers:
            holders[rank, torch.tensor(followers)] = True
    for axis in [*region.columns, *region.rows, *region.others]:
        own_roots = roots[labelled.axis_labels[axis]]
        held = holders[:, own_roots]
        if axis[0] in labelled.arguments:
            shape = labelled.arguments[axis[0]]
            used = torch.isin(own_roots, torch.tensor(region.groups)).view(shape)
            problem = _cut_argument(region, axis[0], held.view(ranks, *shape), used)
            if problem is not None:
                region.cuts.clear()
                return problem
            continue
        if not bool(held.any(0).all()):
            if axis in region.others:
                continue
            region.cuts.clear()
            return "some of its channels are used elsewhere"
        region.cuts[axis] = Cut(axis[1], held.shape[1], tuple(_intervals(mask) for mask in held))
    return None


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
        region.arguments[name] = Cut(dim, period, tuple(_intervals(mask) for mask in own[:, :period]))
        return None
    return f"its part of the argument {name} is not along one dim"


def _needs(region: SplitRegion, labelled: LabelledGraph, roots: Tensor) -> dict[int, tuple[int, ...]]:
    """Map each group to the shared groups that it needs."""
    known = set(region.groups)
    found: dict[int, set[int]] = defaultdict(set)
    for pairs in labelled.labels.followers:
        for group, shared in torch.unique(roots[pairs], dim=1).T.tolist():
            if group in known:
                found[group].add(shared)
    return {group: tuple(sorted(shared)) for group, shared in found.items()}


def _shares(
    region: SplitRegion,
    needs: dict[int, tuple[int, ...]],
    ranks: int,
    grain: int,
    labelled: LabelledGraph,
    roots: Tensor,
) -> list[list[int]] | None:
    """Return the groups of each rank: consecutive, and as even in number as possible. Groups that need the same shared
    ones get separate ranks. None: there are more such families than ranks, or too few groups in one."""
    if not needs:
        count = len(region.groups)
        single = all(len(labelled.axis_labels[axis]) == count for axis in region.rows)
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


def _runs(items: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    found, position = [], 0
    for size in sizes:
        found.append(list(items[position : position + size]))
        position += size
    return found


def _intervals(mask: Tensor) -> tuple[tuple[int, int], ...]:
    edges = torch.diff(torch.nn.functional.pad(mask.to(torch.int8), (1, 1)))
    lows = (edges == 1).nonzero().flatten().tolist()
    highs = (edges == -1).nonzero().flatten().tolist()
    return tuple(zip(lows, highs, strict=True))
