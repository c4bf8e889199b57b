"""The order of a rank's channels in its local tensor.

A fused projection may consist of a fixed number of blocks, each with the queries, values and keys of some heads (four
in CodeGen). The forward of a part splits its channels into as many blocks of fewer heads each, so a rank's channels are
in another order than in the whole tensor. The part's graph determines this order: its labels map channels to inputs of
the following row-parallel layer, which has the rank's groups in ascending order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.planning.plan import TensorParallelPlan
from deepspeed.parallel.tensor.planning.propagation import propagate_labels
from deepspeed.parallel.tensor.planning.solver import Axis, Solution, SplitRegion, intervals_of
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import LabelledGraph

Parts = Mapping[int, tuple[Trace, list[int]]]
"""First rank of those whose parts have equal shapes -> (graph of its part, all of these ranks)."""


def in_local_order(plan: TensorParallelPlan, solution: Solution, parts: Parts) -> TensorParallelPlan:
    """Return ``plan`` with each rank's intervals in the order that the forward of its part expects."""
    orders: dict[Axis, dict[int, Tensor]] = defaultdict(dict)
    roots = solution.labelled.labels.components()
    for trace, ranks in parts.values():
        local = _label_part(trace, solution, ranks[0])
        local_roots = local.labels.components()
        for region in solution.regions:
            for rank in ranks:
                for axis, order in _orders(region, solution, roots, local, local_roots, rank):
                    orders[axis][rank] = order
    parameters = dict(plan.parameters)
    for (name, dim), by_rank in orders.items():
        each = parameters[name]
        if each.cut.dim == dim and len(by_rank) == plan.ranks:
            intervals = tuple(intervals_of(by_rank[rank]) for rank in range(plan.ranks))
            parameters[name] = replace(each, cut=Cut(dim, each.cut.size, intervals))
    return replace(plan, parameters=parameters)


def _label_part(trace: Trace, solution: Solution, rank: int) -> LabelledGraph:
    cuts = {axis: cut for region in solution.regions for axis, cut in region.cuts.items()}
    sharable = {
        axis: mask[_positions(cuts[axis], rank)] if axis in cuts else mask
        for axis, mask in solution.sharable.items()
    }
    return propagate_labels(trace, solution.whole, sharable, solution.labelled.arguments)


def _orders(
    region: SplitRegion,
    solution: Solution,
    roots: Tensor,
    local: LabelledGraph,
    local_roots: Tensor,
    rank: int,
) -> Iterator[tuple[Axis, Tensor]]:
    """Yield, for each dim that feeds channels to the region's sums, the global positions in the rank's local order.
    Dims with indistinguishable channels are skipped."""
    row = region.rows[0]
    if row not in local.axis_labels:
        return
    whole_groups = roots[solution.labelled.axis_labels[row]][_positions(region.cuts[row], rank)]
    local_groups = local_roots[local.axis_labels[row]]
    if len(whole_groups) != len(local_groups):
        return
    same = torch.full((len(local_roots),), -1)
    same[local_groups] = whole_groups
    for axis in (*region.columns, *region.others):
        if axis not in region.cuts or axis not in local.axis_labels or axis in solution.sharable:
            continue
        held = _positions(region.cuts[axis], rank)
        groups = roots[solution.labelled.axis_labels[axis]][held]
        order = _order(held, groups, same[local_roots[local.axis_labels[axis]]])
        if order is not None:
            yield axis, order


def _order(held: Tensor, groups: Tensor, own_groups: Tensor) -> Tensor | None:
    """Sort ``held`` (global positions, in ``groups``) to match ``own_groups``, the group of each local position.
    Channels of one group keep their order. None: the groups differ."""
    by_group, own_by_group = groups.argsort(stable=True), own_groups.argsort(stable=True)
    if not torch.equal(groups[by_group], own_groups[own_by_group]):
        return None
    order = torch.empty_like(held)
    order[own_by_group] = held[by_group]
    return order


def _positions(cut: Cut, rank: int) -> Tensor:
    """Return the positions that the rank holds, int64."""
    runs = [torch.arange(low, high) for low, high in cut.parts[rank]]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
