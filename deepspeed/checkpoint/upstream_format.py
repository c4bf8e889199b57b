"""Checkpoints as release 0.19 of the documented system writes them: their flat partitions as named fragments.

Stages 1 and 2: every optimizer group is one flat tensor, partitioned evenly across ranks; ``param_shapes``
gives the order. Stage 3: every parameter is padded and partitioned evenly, and a rank's parts are laid end to end.
Stage 0: whole tensors by number, in the order of the optimizer that saved them.
Of tensor-parallel ranks each has files like these of its own, with its parts for whole tensors (``splits``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.archive import Archive
from deepspeed.checkpoint.catalog import Catalog, Group, Source
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.names import (
    DS_CONFIG,
    DS_VERSION,
    OPTIMIZER_STATE,
    RESERVED_KEYS,
    model_ranks,
    optim_ranks,
)
from deepspeed.checkpoint.placement import Placement
from deepspeed.checkpoint.shards import ShardIndex
from deepspeed.checkpoint.splits import Shape, Wanted, split_placements
from deepspeed.checkpoint.state import MASTER
from deepspeed.checkpoint.universal_format import add_universal, is_universal, read_common
from deepspeed.checkpoint.upstream_experts import KEYS, SavedExperts

Read = Callable[[Path], dict[str, Any]]
Order = Sequence[Sequence[str]]
"""Names of parameters by optimizer group, in the order in which the optimizer holds them."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The files of one tensor-parallel rank: its model file, and where its tensors lie in whole ones. ``first``: of
    copies that every rank has, those of this rank are read."""

    path: Path
    content: Mapping[str, Any]
    placements: Mapping[str, Placement | None]
    first: bool = True

    def index(self, name: str, shape: Shape, start: int = 0, stop: int | None = None) -> ShardIndex | None:
        """Elements ``[start, stop)`` of what this rank saved under ``name``; None: another rank's copy is read."""
        stop = prod(shape) if stop is None else stop
        if name not in self.placements:
            return ShardIndex(name, shape, (), start, stop) if self.first else None
        placement = self.placements[name]
        if placement is None or not (placement.boxes or self.first):
            return None
        return placement.index(name, start, stop)


def open_upstream(
    folder: Path,
    models: list[Path],
    optims: list[Path],
    first: dict[str, Any],
    read: Read,
    order: Order | None,
    wanted: Wanted | None = None,
) -> Catalog:
    """``optims`` is empty if only weights are wanted; ``order`` is needed for the optimizer state of stage 0,
    ``wanted`` for the parts of tensor-parallel ranks that do not say how they belong together."""
    catalog = Catalog(
        folder=folder,
        written_by=str(first[DS_VERSION]),
        zero_stage=0,
        aliases=dict(first.get("shared_params") or {}),
        model_states={key: value for key, value in first.items() if key in RESERVED_KEYS and key != "module"},
        client_state={k: value for k, value in first.items() if k not in RESERVED_KEYS and k not in KEYS},
    )
    if is_universal(folder):
        _add_universal(catalog, models, first, read, wanted)
        return catalog
    if models[0].name.startswith("zero_"):
        catalog.zero_stage = 3
        contents = _stage3_models(catalog, models, first, read)
        _add_stage3(catalog, contents, _complete(folder, optims, int(first["dp_world_size"])), read)
    else:
        parts = _parts(catalog, models, first, read, wanted)
        experts = SavedExperts.find(folder, first, first.get(DS_CONFIG) or {}, read)
        for part in parts:
            _add_module(catalog, part)
        for path, weights in experts.files.items():
            _add_module(catalog, _Part(path, {"module": weights}, {}))
        for part in parts:
            if optims:
                rank = (model_ranks(part.path.name) or (0, 0))[1]
                own = [path for path in optims if (optim_ranks(path.name) or (0, 0))[1] == rank]
                _add_partitions(catalog, part, own, read, experts)
            elif experts.files and order is not None:
                for share, path in enumerate(experts.optimizers):
                    held = _Part(path, {"module": part.content["module"], **read(path)}, {}, share == 0)
                    _add_whole(catalog, held, experts.order(order, share))
            elif part.content.get("optimizer") is not None:
                _add_whole(catalog, part, order)
        shapes = parts[0].content.get("param_shapes") if optims else None
        _check_covered(catalog, {name: shape for group in shapes or () for name, shape in group.items()})
    if catalog.fragments:
        catalog.index = {"trained": sorted(catalog.fragments), "optimizer_order": _optimizer_order(catalog)}
        catalog.has_optimizer = True
    return catalog


def _parts(
    catalog: Catalog,
    models: list[Path],
    first: dict[str, Any],
    read: Read,
    wanted: Wanted | None,
    elsewhere: Container[str] = (),
) -> list[_Part]:
    """What each tensor-parallel rank saved, without names ``elsewhere``; of one rank alone, all."""
    parallel = first.get("checkpoint_parallel_dimensions") or {}
    ranks = int(parallel.get("tp_degree") or first.get("mp_world_size") or 1)
    if int(parallel.get("pp_degree") or 1) > 1:
        raise CheckpointError(
            f"{catalog.folder} was written by release {catalog.written_by} with {parallel['pp_degree']} pipeline "
            "stages; such checkpoints cannot be read yet"
        )
    if ranks == 1:
        return [_Part(models[0], first, {})]
    by_rank = {
        (model_ranks(path.name) or (0, 0))[1]: path for path in models if not path.name.startswith("zero_")
    }
    missing = [rank for rank in range(ranks) if rank not in by_rank]
    if missing:
        raise CheckpointNotFoundError(
            f"{catalog.folder} lacks the model file of tensor-parallel rank {missing[0]} ({len(missing)} of {ranks} "
            "are missing)"
        )
    contents = [first if by_rank[rank] == models[0] else read(by_rank[rank]) for rank in range(ranks)]
    names = [name for name, value in first["module"].items() if isinstance(value, Tensor)]
    info = first.get(UNIVERSAL_CHECKPOINT_INFO)
    buffers = set(first.get("buffer_names") or ())
    placed = {
        name: split_placements(name, [tuple(c["module"][name].shape) for c in contents], info, wanted)
        for name in names
        if name not in buffers and name not in elsewhere
    }
    same = wanted is not None and wanted.ranks == ranks
    preferred = wanted.rank if wanted is not None and same else 0
    return [
        _Part(by_rank[r], contents[r], {name: of[r] for name, of in placed.items()}, r == preferred)
        for r in range(ranks)
    ]


def _add_module(catalog: Catalog, part: _Part, whole: Callable[[str], bool] = lambda name: True) -> None:
    """Tensors of the module's state dict that are ``whole`` in this file."""
    for name, value in part.content["module"].items():
        if not isinstance(value, Tensor):
            catalog.extra.setdefault(name, value)
            continue
        catalog.module_dtypes.setdefault(name, value.dtype)
        index = part.index(name, tuple(value.shape)) if whole(name) else None
        if index is not None:
            catalog.add_module(Source(index, value.detach().reshape(-1), _unhashed(part.path)))


# Universal checkpoints: whole tensors by name -----------------------------------------------------------------


def _add_universal(
    catalog: Catalog, models: list[Path], first: dict[str, Any], read: Read, wanted: Wanted | None
) -> None:
    """Trained parameters from their folders; frozen ones and buffers from the model files."""
    groups: Sequence[Mapping[str, Any]] = first.get("param_shapes") or []
    trained = {name for group in groups for name in group}
    if models[0].name.startswith("zero_"):
        catalog.zero_stage = 3
        contents = _stage3_models(catalog, models, first, read)
        _add_stage3_weights(catalog, contents)
    else:
        for part in _parts(catalog, models, first, read, wanted, trained):
            _add_module(catalog, part, lambda name: name not in trained)
    for name in trained:
        catalog.module.setdefault(name, [])
    common = read_common(catalog.folder)
    catalog.scalars = _scalars(common.get("loss_scaler"))
    add_universal(catalog, groups, common, wanted)


# Stages 1 and 2 --------------------------------------------------------------------------------------------


def _add_partitions(
    catalog: Catalog, part: _Part, optims: list[Path], read: Read, experts: SavedExperts
) -> None:
    states = {path: read(path)[OPTIMIZER_STATE] for path in optims}
    count = max(_as_list(next(iter(states.values()))["partition_count"]))
    files = _complete(catalog.folder, optims, count)
    catalog.zero_stage = int(states[files[0]].get("zero_stage", 1))  # its bf16 optimizer does not record it
    shapes: list[Mapping[str, Any]] = part.content["param_shapes"]
    names: list[list[str]] = []
    for number, first in enumerate(shapes):
        names.append([])
        for group, members in experts.shares(first, files):
            names[-1] += group
            start = 0
            for path in members:
                start += _add_group_part(catalog, part, number, group, start, states[path], path)
    if catalog.groups:
        return  # those of another tensor-parallel rank, which are equal
    _add_groups(catalog, states[files[0]]["base_optimizer_state"]["param_groups"], names)
    catalog.scalars = _scalars(states[files[0]].get("loss_scaler"))


def _add_group_part(
    catalog: Catalog,
    part: _Part,
    number: int,
    shapes: Mapping[str, Any],
    start: int,
    state: Mapping[str, Any],
    path: Path,
) -> int:
    """One rank's part of one group, which begins at ``start`` in the group's flat tensor; returns its length.

    The order in the flat tensor is that of ``shapes``; each parameter may be followed by padding. (The file
    also has ``param_slice_mappings``, whose names are wrong with ``round_robin_gradients``.)
    """
    base = state["base_optimizer_state"]
    if not isinstance(base, dict):
        raise CheckpointError(
            f"{path} holds an elastic optimizer state (elastic_checkpoint), which cannot be read"
        )
    masters = state["single_partition_of_fp32_groups"][number]
    flat = {MASTER: masters, **base["state"].get(number, {})}
    paddings = (state.get("param_alignment_paddings") or {number: [0] * len(shapes)})[number]
    position = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = prod(shape)
        low, high = max(position, start), min(position + numel, start + masters.numel())
        if low < high:
            index = part.index(name, tuple(shape), low - position, high - position)
            if index is not None:
                _add_slices(catalog, index, flat, low - start, path)
        position += numel + padding
    return masters.numel() + int(state["group_paddings"][number])


def _check_covered(catalog: Catalog, shapes: Mapping[str, Any]) -> None:
    """That all of each tensor was found; ``shapes``: of trained parameters on the first rank."""
    for name in {**catalog.fragments, **shapes}:
        sources = catalog.fragments.get(name, {}).get(MASTER, [])
        held = sum(source.index.numel for source in sources)
        numel = prod(sources[0].index.global_shape if sources else shapes.get(name, ()))
        # of matrices that are fused in an unknown way, one rank's part is all that it needs
        alone = len({source.index.boxes for source in sources}) == 1 and bool(sources[0].index.boxes)
        if held != numel and not alone:
            raise CheckpointError(f"{catalog.folder} is incomplete: {name} has {held} of {numel} elements")


def _add_slices(catalog: Catalog, index: ShardIndex, flat: Mapping[str, Any], start: int, path: Path) -> None:
    """What the flat tensors of one partition hold of one parameter, beginning at ``start``."""
    for kind, value in flat.items():
        if isinstance(value, Tensor) and value.dim() == 1:
            catalog.add_fragment(kind, Source(index, value[start : start + index.numel], _unhashed(path)))
        elif value is not None:
            catalog.values.setdefault(index.name, {})[kind] = value


def round_robin(names: Sequence[Any], ranks: int) -> list[Any]:
    """``round_robin_gradients``' order of a group at stage 2: every ``ranks``-th parameter from the first, then every
    ``ranks``-th from the second, and so on."""
    return [name for first in range(ranks) for name in names[first::ranks]]


def _optimizer_order(catalog: Catalog) -> list[list[str]]:
    """Names by group in the order of the client's optimizer, where the files have another order."""
    config = (catalog.model_states.get(DS_CONFIG) or {}).get("zero_optimization") or {}
    if catalog.zero_stage != 2 or not config.get("round_robin_gradients"):
        return [list(group.names) for group in catalog.groups]
    ranks = int(catalog.model_states["dp_world_size"])
    places = [round_robin(range(len(group.names)), ranks) for group in catalog.groups]
    return [
        [name for _, name in sorted(zip(order, group.names, strict=True))]
        for order, group in zip(places, catalog.groups, strict=True)
    ]


# Stage 3 ---------------------------------------------------------------------------------------------------


def _stage3_models(
    catalog: Catalog, models: list[Path], first: dict[str, Any], read: Read
) -> dict[Path, dict[str, Any]]:
    if int(first.get("mp_world_size") or 1) > 1:
        raise CheckpointError(
            f"{catalog.folder} was written by release {catalog.written_by} at stage 3 with model parallelism "
            f"{first['mp_world_size']}; such checkpoints cannot be read"
        )
    return {path: first if path == models[0] else read(path) for path in models}


def _add_stage3_weights(catalog: Catalog, contents: Mapping[Path, dict[str, Any]]) -> None:
    """Buffers, and the parts of frozen weights."""
    world = len(contents)
    for path, content in contents.items():
        rank = (model_ranks(path.name) or (0, 0))[0]
        if rank == 0:
            _add_module(catalog, _Part(path, content, {}), set(content["buffer_names"]).__contains__)
        shapes = content.get("frozen_param_shapes") or {}
        for name, part in (content.get("frozen_param_fragments") or {}).items():
            index = _even_part(name, tuple(shapes[name]), rank, world)
            catalog.add_module(Source(index, part.reshape(-1)[: index.numel], _unhashed(path)))


def _add_stage3(
    catalog: Catalog, contents: Mapping[Path, dict[str, Any]], optims: list[Path], read: Read
) -> None:
    world = len(contents)
    _add_stage3_weights(catalog, contents)
    groups = [list(group.items()) for group in next(iter(contents.values()))["param_shapes"]]
    for path in optims:
        rank = (optim_ranks(path.name) or (0, 0))[0]
        state = read(path)[OPTIMIZER_STATE]
        inner = state[OPTIMIZER_STATE]
        params = (item for group in groups for item in group)
        for number, masters in enumerate(state["fp32_flat_groups"]):
            flat = {MASTER: masters, **inner["state"].get(number, {})}
            _walk_stage3(catalog, params, flat, masters.numel(), rank, world, path)
        if path == optims[0]:
            _add_groups(catalog, inner["param_groups"], [[name for name, _ in group] for group in groups])
            catalog.scalars = _scalars(state.get("loss_scaler"))


def _walk_stage3(
    catalog: Catalog,
    params: Iterator[tuple[str, Any]],
    flat: Mapping[str, Any],
    numel: int,
    rank: int,
    world: int,
    path: Path,
) -> None:
    """Take parameters from ``params`` until their parts fill a sub-group of ``numel`` elements."""
    position = 0
    while position < numel:
        name, shape = next(params)
        index = _even_part(name, tuple(shape), rank, world)
        _add_slices(catalog, index, flat, position, path)
        position += -(-prod(shape) // world)


def _even_part(name: str, shape: tuple[int, ...], rank: int, world: int) -> ShardIndex:
    size = prod(shape)
    part = -(-size // world)
    return ShardIndex(name, shape, (), min(rank * part, size), min((rank + 1) * part, size))


# Stage 0 ---------------------------------------------------------------------------------------------------


def _add_whole(catalog: Catalog, part: _Part, order: Order | None) -> None:
    """A torch optimizer's state dict by number, with fp32 masters next to it where the weights are 16-bit."""
    optimizer, path, module = part.content["optimizer"], part.path, part.content["module"]
    inner = optimizer.get(OPTIMIZER_STATE, optimizer)
    numbers: list[list[int]] = [list(group["params"]) for group in inner["param_groups"]]
    masters: Sequence[Any] = optimizer.get("fp32_groups") or optimizer.get("fp32_groups_flat") or []
    if order is None:
        return  # only weights are wanted, and the model file has those
    if "fp32_groups_flat" in optimizer:
        raise CheckpointError(
            f"{path} holds flat fp32 groups of a fused fp16 optimizer at stage 0: save it at stage 1"
        )
    names = [_named(group, numbers, catalog, path) for group, numbers in zip(order, numbers, strict=False)]
    if len(names) != len(numbers):
        raise CheckpointError(
            f"{path} has {len(numbers)} parameter groups, but the optimizer has {len(order)}"
        )
    for number, group in enumerate(names):
        for position, name in enumerate(group):
            held = module.get(catalog.aliases.get(name, name))
            if held is not None:
                shape = tuple(held.shape)
                index = part.index(name, shape)
            else:  # an expert, whose weights are in a file of their own
                saved = catalog.module[name][0]
                held, shape, index = saved.data, saved.index.global_shape, saved.index
            if index is None:
                continue
            state = dict(inner["state"].get(numbers[number][position], {}))
            state[MASTER] = masters[number][position] if masters else held
            for kind, value in state.items():
                if isinstance(value, Tensor) and (value.dim() or not shape) and value.numel() == index.numel:
                    catalog.add_fragment(kind, Source(index, value.detach().reshape(-1), _unhashed(path)))
                elif value is not None:
                    catalog.values.setdefault(name, {})[kind] = value
    if not catalog.groups:
        _add_groups(catalog, inner["param_groups"], names)
        catalog.scalars = _scalars(optimizer)


def _named(group: Sequence[str], numbers: list[int], catalog: Catalog, path: Path) -> list[str]:
    """Names for the numbers of one group: the same order, without the empty tensors that 16-bit optimizers
    drop."""
    names = [name for name in group if catalog.find([name])]
    if len(names) != len(numbers):
        names = [name for name in names if catalog.module[name][0].index.numel]
    if len(names) != len(numbers):
        raise CheckpointError(
            f"{path} has a parameter group of {len(numbers)}, but the optimizer's has {len(group)}"
        )
    return names


# Shared by all stages --------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def _unhashed(path: Path) -> Archive:
    """That release writes no hashes."""
    return Archive(path, {}, 0)


def _add_groups(catalog: Catalog, saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> None:
    catalog.groups = [
        Group({key: value for key, value in group.items() if key != "params"}, tuple(members))
        for group, members in zip(saved, names, strict=True)
    ]


def _scalars(scaler: Any) -> dict[str, Any]:
    """The loss scale from the pickled scaler's attributes, or from the keys that stage 0 has instead."""
    saved = vars(scaler) if hasattr(scaler, "__dict__") else dict(scaler or {})
    if "cur_scale" not in saved:
        return {}
    good_steps = int(saved.get("cur_iter", 0)) - int(saved.get("last_overflow_iter", -1)) - 1
    state: dict[str, Any] = {"scale": float(saved["cur_scale"]), "good_steps": max(good_steps, 0)}
    if "cur_hysteresis" in saved:
        state["tolerance_left"] = int(saved["cur_hysteresis"])
    return {
        "loss_scaler": state,
        "dynamic": bool(saved.get("dynamic", saved.get("dynamic_loss_scale", False))),
    }


def _complete(folder: Path, optims: list[Path], count: int) -> list[Path]:
    """The files of ranks 0 to ``count - 1``, in that order; those of a larger earlier run are left out."""
    by_rank = {(optim_ranks(path.name) or (0, 0))[0]: path for path in optims}
    missing = [rank for rank in range(count) if rank not in by_rank]
    if missing and optims:
        raise CheckpointNotFoundError(
            f"{folder} lacks the optimizer file of rank {missing[0]} ({len(missing)} of {count} are missing)"
        )
    return [by_rank[rank] for rank in range(count)] if optims else []


def _as_list(value: Any) -> list[int]:
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else [int(value)]
