"""Partition parameters: from a module and a plan to bucket layouts. No allocation, no communication.

Both the engine and the memory planner (``deepspeed/planning``) start here, so what is planned is what is built.

[Note: blocks and copies] Few-bit formats share one scale among neighbours in a bucket. The ranks of a tensor-parallel
layer hold different parts of its weights and equal copies of the rest, such as norms. If a quantization block mixed
the two, each rank would round its copies differently, and they would drift. So where anything travels rounded, parts
of tensors have their own buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from deepspeed.base.sharded import full_numel
from deepspeed.config.plan import Plan
from deepspeed.zero.layout import BucketLayout, CutPolicy, ParamSpec, cut
from deepspeed.zero.placements import is_partial
from deepspeed.zero.precision import wire_dtypes
from deepspeed.zero.replica_groups import replica_group_name

if TYPE_CHECKING:
    from deepspeed.config.sections.zero import DeepSpeedZeroConfig


# Gather units of a module: its repeated blocks, and the modules between them.


def assign_units(module: nn.Module) -> dict[nn.Parameter, int]:
    """Map every parameter of ``module`` to the number of its unit, in registration order.

    A unit is one block (see ``blocks_of``) or a maximal run of parameters that belong to no block. A tied parameter
    belongs to the unit that registers it first.
    """
    units: dict[nn.Parameter, int] = {}
    unit, between = -1, False  # the last number, and whether it is that of a run between blocks
    for block, params in _parts(module):
        new = [param for param in params if param not in units]
        if block is not None or (new and not between):
            unit, between = unit + 1, block is None
        units.update(dict.fromkeys(new, unit))
    return units


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks of a model, in order.

    A block is an element of a container (``ModuleList``, ``Sequential``, ``ModuleDict``) or a composite child of any
    module, of a class that occurs at least twice there and makes up at least half of the candidates.
    """
    return [block for block, _ in _parts(module) if block is not None]


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module | None, Iterable[nn.Parameter]]]:
    """Yield the module's own parameters, then each block among its children with the block's parameters, and the parts
    of the other children."""
    yield None, (param for param in module._parameters.values() if param is not None)
    blocks = _repeated_children(module)
    for child in module.children():
        if child in blocks:
            yield child, child.parameters()
        else:
            yield from _parts(child)


def _repeated_children(module: nn.Module) -> set[nn.Module]:
    container = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    candidates = [
        child
        for child in module.children()
        if (container or next(child.children(), None) is not None)
        and next(child.parameters(), None) is not None
    ]
    by_class: dict[type, list[nn.Module]] = {}
    for child in candidates:
        by_class.setdefault(type(child), []).append(child)
    return {
        child
        for same in by_class.values()
        if len(same) >= 2 and 2 * len(same) >= len(candidates)
        for child in same
    }


MERGE_NUMEL = 4 * 1024 * 1024
"""Stages 0 to 2: consecutive small blocks share a bucket up to this size: fewer collectives that still overlap."""

UNIT_NUMEL = 2**31 - 1
"""Stage 3: a gather unit is split further only above this size, which 32-bit element counts can still address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParams:
    """The parameters that the engine trains, each once, in registration order."""

    params: list[nn.Parameter]
    names: list[str]
    shared: list[tuple[str, ...]]
    units: list[int]
    held: int
    """Number of parameters that the optimizer holds; these come first."""


def trained_params(module: nn.Module, groups: Iterable[dict[str, Any]]) -> TrainedParams:
    """Return the trainable parameters in the optimizer's ``groups``; those outside ``module`` come last."""
    return named_params(module, [p for group in groups for p in group["params"] if p.requires_grad])


def named_params(module: nn.Module, params: Iterable[nn.Parameter]) -> TrainedParams:
    """Return exactly ``params``, each once, in the order of ``module``; those outside it come last."""
    held = {id(p): p for p in params}
    units = assign_units(module)
    aliases: dict[int, list[str]] = {}
    order: list[nn.Parameter] = []
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in held:
            if id(param) not in aliases:
                order.append(param)
            aliases.setdefault(id(param), []).append(name)
    outside = [p for key, p in held.items() if key not in aliases]
    after = max(units.values(), default=-1) + 1
    return TrainedParams(
        params=order + outside,
        names=[aliases[id(p)][0] for p in order] + [f"outside_module.{i}" for i in range(len(outside))],
        shared=[tuple(aliases[id(p)][1:]) for p in order] + [()] * len(outside),
        units=[units[p] for p in order] + [after] * len(outside),
        held=len(order) + len(outside),
    )


def with_frozen(module: nn.Module, trained: TrainedParams) -> TrainedParams:
    """Return the trained parameters, then the others of ``module``, so that the trained ones keep their indices."""
    units = assign_units(module)
    known = {id(p) for p in trained.params}
    others = [(n, p) for n, p in module.named_parameters() if id(p) not in known]
    return TrainedParams(
        params=trained.params + [p for _, p in others],
        names=trained.names + [n for n, _ in others],
        shared=trained.shared + [()] * len(others),
        units=trained.units + [units[p] for _, p in others],
        held=trained.held,
    )


def param_specs(
    module: nn.Module,
    trained: TrainedParams,
    plan: Plan,
    dtype_of: Callable[[nn.Parameter], torch.dtype] = lambda param: param.dtype,
) -> list[ParamSpec]:
    """Return one row per parameter. ``dtype_of``: the dtype that a parameter will have once the engine has cast it."""
    special = wire_dtypes(module, plan.precision)
    by_rows = sparse_parameters(module) if plan.gradients.sparse else set()
    return [
        ParamSpec(
            index=i,
            name=trained.names[i],
            numel=full_numel(param),
            dtype=dtype_of(param),
            unit=trained.units[i],
            replica_group=replica_group_name(param),
            wire_dtype=plan.precision.reduce or special.get(param, dtype_of(param)),
            requires_grad=i < trained.held,  # not reduced if in no optimizer, whatever its flag
            own_bucket=param in by_rows,
            separate=plan.packing.rounds and is_partial(param),
        )
        for i, param in enumerate(trained.params)
    ]


def cut_whole(
    specs: Sequence[ParamSpec], plan: Plan, ranks: int | Mapping[str, int], grain: int = 1
) -> tuple[BucketLayout, ...]:
    """Return the buckets of stages 0 to 2, where parameters stay whole on every rank.

    Args:
        ranks: number of ranks that share one copy of the states, or that number by replica group.
        grain: of the optimizer (``UpdateTraits``).
    """
    policy = CutPolicy(max_numel=plan.zero.reduce_bucket_numel, merge_numel=MERGE_NUMEL, grain=grain)
    return cut(specs, policy, ranks if plan.zero.shard_state else 1)


def cut_sharded(
    specs: Sequence[ParamSpec], zero: DeepSpeedZeroConfig, ranks: int | Mapping[str, int], grain: int = 1
) -> list[tuple[BucketLayout, bool]]:
    """Return ``(layout, persistent)`` per bucket of stage 3; persistent buckets hold small parameters and stay
    gathered."""
    persist = persistence_threshold(
        (spec.numel for spec in specs),
        int(zero.param_persistence_threshold),
        int(zero.model_persistence_threshold),
    )
    policy = CutPolicy(max_numel=UNIT_NUMEL, persist_numel=persist, grain=grain)
    return [
        (layout, all(slot.numel <= policy.persist_numel for slot in layout.slots))
        for layout in cut(specs, policy, ranks)
    ]


def persistence_threshold(numels: Iterable[int], threshold: int, most: int) -> int:
    """Return the largest size up to ``threshold`` such that all parameters of at most that size hold at most ``most``
    elements.

    Small parameters come first, because each costs a gather and takes little memory; parameters of one size persist
    together or not at all, so the result does not depend on their order.
    """
    sizes = sorted(n for n in numels if 0 < n <= threshold)
    if sum(sizes) <= most:
        return threshold
    fitting, total = 0, 0
    for size in sorted(set(sizes)):
        total += size * sizes.count(size)
        if total > most:
            break
        fitting = size
    return fitting


# Row-sparse gradients: `sparse_gradients` communicates only touched rows (`RowSum`), and some optimizers take only
# such gradients.


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the weights of embeddings in ``module`` that nothing else uses (a tied head has a dense gradient)."""
    return set(_embeddings(module))


def stepped_by_rows(module: nn.Module, optimizer: Optimizer) -> set[nn.Parameter]:
    """Return the weights of embeddings with ``sparse=True`` whose gradients ``optimizer`` gets as torch's sparse
    tensors, as it would without an engine. Of torch's own optimizers only SparseAdam needs them; most others refuse
    them, or do the same with dense ones."""
    cls = type(optimizer)
    if cls is not SparseAdam and cls.__module__.startswith(("torch.optim", "deepspeed.")):
        return set()
    return {param for param, owners in _embeddings(module).items() if all(owner.sparse for owner in owners)}


def _embeddings(module: nn.Module) -> dict[nn.Parameter, list[Any]]:
    """Return the embeddings by weight, for weights that only embeddings use."""
    owners: dict[nn.Parameter, list[Any]] = {}
    for owner in module.modules():
        for param in owner.parameters(recurse=False):
            owners.setdefault(param, []).append(owner)
    return {
        param: found
        for param, found in owners.items()
        if all(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) for owner in found)
    }
