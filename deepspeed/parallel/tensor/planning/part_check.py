"""Simulated run of a rank's part of a model: every tensor must have the shape that its labels imply.

The model with this rank's weights and attributes is traced like the whole one. Both graphs must have the same
operations, and each tensor must have the size of the channels that the rank holds. Mismatches (a head count hard-coded
in a forward, an attribute changed by mistake) are thus found before anything is split.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from deepspeed.parallel.tensor.planning.changes import apply_changes
from deepspeed.parallel.tensor.planning.labels import NONE, Labels, varies
from deepspeed.parallel.tensor.planning.local_order import Parts
from deepspeed.parallel.tensor.planning.plan import TensorParallelPlan
from deepspeed.parallel.tensor.planning.solver import Solution
from deepspeed.parallel.tensor.planning.trace import Trace, TraceError, trace
from deepspeed.parallel.tensor.planning.values import PLAIN, LabelledGraph, Value, as_list, is_move


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A mismatch. ``path``: of the module in which it was found; empty: outside all modules with split layers."""

    path: str
    text: str


def trace_parts(run: Trace, solution: Solution, plan: TensorParallelPlan) -> Parts | Mismatch:
    """Trace the ranks' parts, once per set of ranks with equal shapes, or return the first mismatch."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(plan.ranks if plan.parameters else 0):
        alike[tuple(each.cut.extents[rank] for each in plan.parameters.values())].append(rank)
    found: dict[int, tuple[Trace, list[int]]] = {}
    for first, *others in alike.values():
        part = _of_rank(run, solution, plan, first)
        if isinstance(part, Mismatch):
            return part
        found[first] = part, [first, *others]
    return found


def _of_rank(run: Trace, solution: Solution, plan: TensorParallelPlan, rank: int) -> Trace | Mismatch:
    own = _meta_part(run.module, plan, rank)
    owners = sorted({name.rsplit(".", 2)[0] if name.count(".") > 1 else "" for name in plan.parameters})
    inside = _track(own, [path for path in owners if path])
    try:
        part = trace(own, run.inputs)
    except TraceError as error:
        return Mismatch(inside[-1] if inside else "", str(error))
    held = _held(solution, rank)
    for whole, local in zip(_steps(run), _steps(part), strict=False):
        if whole.target != local.target:
            return Mismatch(
                _innermost(whole, owners), f"its operations depend on the number of ranks ({whole.name})"
            )
        for expected, actual in _shapes(whole, local, solution.labelled, held):
            if not _fits(expected, actual):
                return Mismatch(
                    _innermost(whole, owners), f"{whole.name} would have the shape {actual}, not {expected}"
                )
    return part


def _track(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return a list that holds the paths of the modules that the forward is in, of those in ``paths``."""
    inside: list[str] = []
    for path in paths:

        def enter(*_: Any, path: str = path) -> None:
            inside.append(path)

        def leave(*_: Any) -> None:
            inside.pop()

        module.get_submodule(path).register_forward_pre_hook(enter)
        module.get_submodule(path).register_forward_hook(leave)
    return inside


def _meta_part(module: nn.Module, plan: TensorParallelPlan, rank: int) -> nn.Module:
    own = copy.deepcopy(module)
    params = dict(own.named_parameters())
    made: dict[int, nn.Parameter] = {}
    for name, each in plan.parameters.items():
        shape = list(params[name].shape)
        shape[each.cut.dim] = each.cut.extents[rank]
        made[id(params[name])] = nn.Parameter(params[name].new_empty(shape), requires_grad=False)
    for module in own.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and id(param) in made:
                new = module._parameters[name] = made[id(param)]
                if name == "weight" and isinstance(getattr(module, "nf", None), int):
                    vars(module)["nf"] = new.shape[1]
    apply_changes(own, plan, rank)
    return own


def _held(solution: Solution, rank: int) -> Tensor:
    """Return for each label whether the rank holds it, bool [labels]."""
    roots = solution.labelled.labels.components()
    known, own = torch.zeros(len(roots), dtype=torch.bool), torch.zeros(len(roots), dtype=torch.bool)
    for region in solution.regions:
        for axis, cut in region.cuts.items():
            labels = roots[solution.labelled.axis_labels[axis]]
            known[labels] = True
            for low, high in cut.parts[rank]:
                own[labels[low:high]] = True
    held = (own | ~known)[roots]
    held[NONE] = True
    return held


def _steps(run: Trace) -> Iterator[Node]:
    """Yield the nodes that compute. Data movement is skipped: it may differ if there is nothing to repeat (one query
    per key).
    """
    return (
        node
        for node in run.graph.nodes
        if node.op == "call_function"
        and not is_move(node)
        and not str(node.target).startswith("aten._assert")
    )


def _shapes(
    whole: Node, local: Node, labelled: LabelledGraph, held: Tensor
) -> Iterator[tuple[tuple[int | None, ...], tuple[int, ...]]]:
    """Yield (expected, actual) shapes; None: any size."""
    for value, before, after in zip(
        as_list(labelled.values.get(whole)),
        as_list(whole.meta.get("val")),
        as_list(local.meta.get("val")),
        strict=False,
    ):
        if not isinstance(value, Value) or not isinstance(after, Tensor) or value.axes:
            continue
        if value.shape == tuple(before.shape):
            yield _own_shape(value, held, labelled.labels), tuple(int(size) for size in after.shape)


def _fits(expected: tuple[int | None, ...], actual: tuple[int, ...]) -> bool:
    return len(expected) == len(actual) and all(
        size is None or size == found for size, found in zip(expected, actual, strict=True)
    )


def _own_shape(value: Value, held: Tensor, labels: Labels) -> tuple[int | None, ...]:
    if value.ids is None:
        return value.shape
    if value.kind == PLAIN:  # the number of copies of the same values may differ
        return tuple(size if varies(value.ids, dim) else None for dim, size in enumerate(value.shape))
    some = value.ids != NONE
    if not some.any():
        return (None,) * len(value.shape)
    own = held[value.ids] & some
    sizes = [_count(own, some, dim) for dim in range(own.ndim)]
    if not labels.any_sharable(value.ids):
        return tuple(sizes)
    # Each rank copies shared elements once per head that it has.
    single = [torch.unique(value.ids, dim=dim).shape[dim] == size for dim, size in enumerate(value.shape)]
    return tuple(size if one else None for size, one in zip(sizes, single, strict=True))


def _count(own: Tensor, some: Tensor, dim: int) -> int:
    """Count the positions along ``dim`` that the rank holds, or that have no labels."""
    own, some = (each.movedim(dim, 0).reshape(each.shape[dim], -1).any(1) for each in (own, some))
    return int((own | ~some).sum())


def _innermost(node: Node, owners: Sequence[str]) -> str:
    """Return the innermost of ``owners`` that contains a node."""
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        if path.removeprefix("module.") in owners:
            return path.removeprefix("module.")
    return ""
