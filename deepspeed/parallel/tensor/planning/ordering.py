"""The order in which a rank's own tensor has the channels that it was dealt.

A fused projection may consist of a fixed number of blocks, each with the queries, values and keys of some heads (four
in CodeGen). The forward of a part makes as many blocks of fewer heads each, so that a rank's channels lie in another
order than in the whole tensor. The graph of the part says in which: its labels show which channels belong to which
input of the row-parallel layer behind, and that input has the rank's groups in ascending order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.planning.following import follow
from deepspeed.parallel.tensor.planning.plan import TensorParallelPlan
from deepspeed.parallel.tensor.planning.solving import Axis, Solution, SplitRegion
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import Followed

Parts = Mapping[int, tuple[Trace, list[int]]]
"""The first of ranks whose parts have equal shapes -> the graph of its part, and all of these ranks."""


def in_own_order(plan: TensorParallelPlan, solution: Solution, parts: Parts) -> TensorParallelPlan:
    """``plan`` with each rank's intervals in the order in which the forward of its part expects them."""
    orders: dict[Axis, dict[int, Tensor]] = defaultdict(dict)
    roots = solution.followed.labels.components()
    for trace, ranks in parts.values():
        local = _follow_part(trace, solution, ranks[0])
        local_roots = local.labels.components()
        for region in solution.regions:
            for rank in ranks:
                for axis, order in _orders(region, solution, roots, local, local_roots, rank):
                    orders[axis][rank] = order
    parameters = dict(plan.parameters)
    for (name, dim), by_rank in orders.items():
        each = parameters[name]
        if each.cut.dim == dim and len(by_rank) == plan.ranks:
            intervals = tuple(_runs(by_rank[rank]) for rank in range(plan.ranks))
            parameters[name] = replace(each, cut=Cut(dim, each.cut.size, intervals))
    return replace(plan, parameters=parameters)


def _follow_part(trace: Trace, solution: Solution, rank: int) -> Followed:
    cuts = {axis: cut for region in solution.regions for axis, cut in region.cuts.items()}
    soft = {
        axis: mask[_positions(cuts[axis], rank)] if axis in cuts else mask
        for axis, mask in solution.soft.items()
    }
    return follow(trace, solution.whole, soft, solution.followed.arguments)


def _orders(
    region: SplitRegion, solution: Solution, roots: Tensor, local: Followed, local_roots: Tensor, rank: int
) -> Iterator[tuple[Axis, Tensor]]:
    """Yield, for each dim that feeds channels to the region's sums, the positions of the whole dim in the order of the
    rank's own. Nothing for channels that cannot be told apart."""
    row = region.rows[0]
    if row not in local.axis_labels:
        return
    whole_groups = roots[solution.followed.axis_labels[row]][_positions(region.cuts[row], rank)]
    local_groups = local_roots[local.axis_labels[row]]
    if len(whole_groups) != len(local_groups):
        return
    same = torch.full((len(local_roots),), -1)
    same[local_groups] = whole_groups
    for axis in (*region.columns, *region.others):
        if axis not in region.cuts or axis not in local.axis_labels or axis in solution.soft:
            continue
        held = _positions(region.cuts[axis], rank)
        groups = roots[solution.followed.axis_labels[axis]][held]
        order = _order(held, groups, same[local_roots[local.axis_labels[axis]]])
        if order is not None:
            yield axis, order


def _order(held: Tensor, groups: Tensor, own_groups: Tensor) -> Tensor | None:
    """``held``: positions of the whole dim, which are of ``groups``; ``own_groups``: of each position of the rank's own
    dim. Channels of one group keep their order. None: the groups differ."""
    by_group, own_by_group = groups.argsort(stable=True), own_groups.argsort(stable=True)
    if not torch.equal(groups[by_group], own_groups[own_by_group]):
        return None
    order = torch.empty_like(held)
    order[own_by_group] = held[by_group]
    return order


def _positions(cut: Cut, rank: int) -> Tensor:
    """int64 [what the rank has]"""
    runs = [torch.arange(low, high) for low, high in cut.parts[rank]]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)


def _runs(positions: Tensor) -> tuple[tuple[int, int], ...]:
    """As few intervals as have these positions in this order."""
    if not len(positions):
        return ()
    breaks = (torch.diff(positions) != 1).nonzero().flatten().add(1).tolist()
    edges = [0, *breaks, len(positions)]
    return tuple(
        (int(positions[start]), int(positions[end - 1]) + 1)
        for start, end in zip(edges, edges[1:], strict=False)
    )
