"""Reader of checkpoints of release 0.19 of the documented system: flat partitions become named fragments.

Stages 1 and 2: every optimizer group is one flat tensor, partitioned evenly across ranks; ``param_shapes`` gives the
order. Stage 3: every parameter is padded and partitioned evenly, and a rank's parts are laid end to end. Stage 0:
whole tensors by number, in the order of the optimizer that saved them. Each tensor-parallel rank has its own such
files, which hold its parts of the tensors (``splits``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.catalog import Catalog, SavedFragment, param_groups
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.files.archive_reader import Archive
from deepspeed.checkpoint.foreign.splits import Shape
from deepspeed.checkpoint.foreign.universal_format import add_universal, is_universal, read_common
from deepspeed.checkpoint.foreign.upstream_experts import KEYS, SavedExperts
from deepspeed.checkpoint.foreign.upstream_parts import Order, UpstreamFolder, UpstreamPart
from deepspeed.checkpoint.foreign.upstream_pipeline import (
    layer_files,
    layer_weights,
    stage_contents,
    stage_shapes,
)
from deepspeed.checkpoint.names import (
    DS_CONFIG,
    DS_VERSION,
    OPTIMIZER_STATE,
    RESERVED_KEYS,
    has_sharded_weights,
    optim_ranks,
)
from deepspeed.checkpoint.shards import ShardIndex
from deepspeed.checkpoint.state import MASTER


def open_upstream(source: UpstreamFolder) -> Catalog:
    """Return the catalog of the checkpoint."""
    first = source.first
    catalog = Catalog(
        folder=source.path,
        written_by=str(first[DS_VERSION]),
        zero_stage=0,
        aliases=dict(first.get("shared_params") or {}),
        model_states={key: value for key, value in first.items() if key in RESERVED_KEYS and key != "module"},
        client_state={k: value for k, value in first.items() if k not in RESERVED_KEYS and k not in KEYS},
    )
    if is_universal(source.path):
        _add_universal(catalog, source)
        return catalog
    if has_sharded_weights(source.models[0].name):
        catalog.zero_stage = 3
        for rank, shards in enumerate(_stage3_shards(source)):
            _add_stage3_weights(catalog, shards)
            optims = _complete(source.path, source.optims_of(rank), len(shards.contents))
            _add_stage3(catalog, shards, optims, source)
    elif source.stages > 1:
        if source.optims or source.order is not None:
            _add_pipeline(catalog, source)
        else:
            _add_layers(catalog, layer_files(source), {})
    else:
        _add_unsharded(catalog, source)
    if catalog.fragments:
        catalog.index = {"trained": sorted(catalog.fragments), "optimizer_order": _optimizer_order(catalog)}
        catalog.has_optimizer = True
    return catalog


def _add_unsharded(catalog: Catalog, source: UpstreamFolder) -> None:
    """Add a checkpoint of stages 0 to 2 without a pipeline, experts included."""
    parts = source.split_parts()
    experts = SavedExperts.find(source)
    for part in parts:
        _add_module(catalog, part)
    for path, weights in experts.files.items():
        _add_module(catalog, UpstreamPart(path, {"module": weights}, {}))
    for rank, part in enumerate(parts):
        if source.optims:
            _add_partitions(catalog, part, source, rank, experts)
        elif experts.files and source.order is not None:
            for share, path in enumerate(experts.optimizers):
                content = {"module": part.content["module"], **source.read(path)}
                held = UpstreamPart(path, content, {}, share == 0)
                _add_whole(catalog, held, experts.order(source.order, share))
        elif part.content.get("optimizer") is not None:
            _add_whole(catalog, part, source.order)
    shapes = parts[0].content.get("param_shapes") if source.optims else None
    _check_covered(catalog, {name: shape for group in shapes or () for name, shape in group.items()})


def _add_pipeline(catalog: Catalog, source: UpstreamFolder) -> None:
    """Add all pipeline stages; of a tied weight, the first stage's copy."""
    layers, wanted = layer_files(source), source.wanted
    known = {
        name: placement.global_shape for name, placement in (wanted.placements if wanted else {}).items()
    }
    for number, content in layers.values():
        known |= {f"{number}.{key}": tuple(v.shape) for key, v in content.items() if isinstance(v, Tensor)}
    trained: dict[str, Shape] = {}
    groups: list[list[str]] = []
    for stage, (path, content) in enumerate(stage_contents(source).items()):
        states = [source.read(optim)[OPTIMIZER_STATE] for optim in source.optims_of(stage)]
        shapes = stage_shapes(path, content, states, known)
        lost = [name for group in shapes for name in group if name not in known]
        if lost and wanted is None and content.get("param_shapes") is None:
            raise CheckpointError(
                f"no file in {catalog.folder} holds the shape of {lost[0]}: load the checkpoint into an "
                "engine, and save it again"
            )
        part = UpstreamPart(path, {**content, "param_shapes": shapes}, dict.fromkeys(trained))
        _add_partitions(catalog, part, source, stage, SavedExperts())
        groups = groups or [[] for _ in shapes]
        for names, group in zip(groups, shapes, strict=True):
            names += [name for name in group if name not in trained]
        trained |= {name: shape for group in shapes for name, shape in group.items()}
    catalog.groups = param_groups((group.options for group in catalog.groups), groups)
    _add_layers(catalog, layers, trained)
    _check_covered(catalog, trained)


def _add_layers(
    catalog: Catalog, layers: Mapping[Path, tuple[str, dict[str, Any]]], trained: Mapping[str, Shape]
) -> None:
    for path, (number, content) in layers.items():
        _add_module(catalog, UpstreamPart(path, {"module": layer_weights(number, content, trained)}, {}))
    for name in trained:
        catalog.module.setdefault(name, [])  # a tied weight may exist as masters only


def _add_module(
    catalog: Catalog, part: UpstreamPart, whole: Callable[[str], bool] = lambda name: True
) -> None:
    """Add the tensors of the module's state dict for which ``whole(name)`` holds."""
    for name, value in part.content["module"].items():
        if not isinstance(value, Tensor):
            catalog.extra.setdefault(name, value)
            continue
        catalog.module_dtypes.setdefault(name, value.dtype)
        index = part.index(name, tuple(value.shape)) if whole(name) else None
        if index is not None:
            catalog.add_module(_fragment(index, value, part.path))


# Universal checkpoints: whole tensors by name -----------------------------------------------------------------


def _add_universal(catalog: Catalog, source: UpstreamFolder) -> None:
    """Add trained parameters from their folders, and frozen ones and buffers from the model files. Each pipeline
    stage names its own parameters; its weights are in no model file."""
    contents = map(source.read, source.models if source.stages > 1 else source.models[:1])
    of_stages = [content.get("param_shapes") or [] for content in contents]
    groups = [
        dict(item for shapes in group for item in shapes.items()) for group in zip(*of_stages, strict=True)
    ]
    trained = {name for group in groups for name in group}
    if has_sharded_weights(source.models[0].name):
        catalog.zero_stage = 3
        for shards in _stage3_shards(source):
            _add_stage3_weights(catalog, shards)
    elif source.first["module"] is not None:
        for part in source.split_parts(trained):
            _add_module(catalog, part, lambda name: name not in trained)
    for name in trained:
        catalog.module.setdefault(name, [])
    common = read_common(source)
    catalog.scalars = _scalars(common.get("loss_scaler"))
    add_universal(catalog, source, groups, common)


# Stages 1 and 2 --------------------------------------------------------------------------------------------


def _add_partitions(
    catalog: Catalog, part: UpstreamPart, source: UpstreamFolder, rank: int, experts: SavedExperts
) -> None:
    """Add the optimizer files of model-parallel ``rank``, whose model file is ``part``."""
    optims = source.optims_of(rank)
    states = {path: source.read(path)[OPTIMIZER_STATE] for path in optims}
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
        return  # already added, from another tensor-parallel rank; they are equal
    catalog.groups = param_groups(states[files[0]]["base_optimizer_state"]["param_groups"], names)
    catalog.scalars = _scalars(states[files[0]].get("loss_scaler"))


def _add_group_part(
    catalog: Catalog,
    part: UpstreamPart,
    number: int,
    shapes: Mapping[str, Any],
    start: int,
    state: Mapping[str, Any],
    path: Path,
) -> int:
    """Add one rank's partition of one group, which begins at ``start`` in the group's flat tensor; return its length.

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
    """Check that all of each tensor was found; ``shapes``: of trained parameters on the first rank."""
    for name in {**catalog.fragments, **shapes}:
        sources = catalog.fragments.get(name, {}).get(MASTER, [])
        held = sum(source.index.numel for source in sources)
        numel = prod(sources[0].index.global_shape if sources else shapes.get(name, ()))
        # of matrices fused in an unknown way, only this rank's part is needed and read
        alone = len({source.index.boxes for source in sources}) == 1 and bool(sources[0].index.boxes)
        if held != numel and not alone:
            raise CheckpointError(f"{catalog.folder} is incomplete: {name} has {held} of {numel} elements")


def _add_slices(catalog: Catalog, index: ShardIndex, flat: Mapping[str, Any], start: int, path: Path) -> None:
    """Add one parameter's slice of a partition's flat tensors, beginning at ``start``."""
    for kind, value in flat.items():
        if isinstance(value, Tensor) and value.dim() == 1:
            catalog.add_fragment(kind, _fragment(index, value[start : start + index.numel], path))
        elif value is not None:
            catalog.values.setdefault(index.name, {})[kind] = value


def round_robin(names: Sequence[Any], ranks: int) -> list[Any]:
    """Reorder a group as ``round_robin_gradients`` does at stage 2: every ``ranks``-th parameter from the first, then
    every ``ranks``-th from the second, and so on."""
    return [name for first in range(ranks) for name in names[first::ranks]]


def _optimizer_order(catalog: Catalog) -> list[list[str]]:
    """Return the names by group in the order of the client's optimizer, which may differ from that of the files."""
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


@dataclass(frozen=True, slots=True)
class _Shards:
    """Model files of one tensor-parallel rank, in the order of its data-parallel ranks."""

    part: UpstreamPart
    contents: Mapping[Path, Mapping[str, Any]]

    def even(self, name: str, shape: Shape, number: int) -> ShardIndex | None:
        """Return the elements of a parameter that data-parallel rank ``number`` holds; None: another rank's copy is
        read."""
        size = prod(shape)
        length = -(-size // len(self.contents))
        return self.part.index(name, shape, min(number * length, size), min((number + 1) * length, size))


def _stage3_shards(source: UpstreamFolder) -> list[_Shards]:
    files = source.models_of_ranks(sharded=True)
    if source.ranks == 1:
        parts = [UpstreamPart(*next(iter(files[0].items())), {})]
    else:
        heads = [next(iter(contents.values())) for contents in files]
        parts = source.placed_parts(files, [_stage3_shapes(content) for content in heads])
    return [_Shards(part, contents) for part, contents in zip(parts, files, strict=True)]


def _stage3_shapes(content: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the parameters that one tensor-parallel rank's data-parallel ranks partition."""
    groups = [*content["param_shapes"], content.get("frozen_param_shapes") or {}]
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _add_stage3_weights(catalog: Catalog, shards: _Shards) -> None:
    """Add buffers, and the shards of frozen weights."""
    for number, (path, content) in enumerate(shards.contents.items()):
        if number == 0:
            _add_module(catalog, shards.part, set(content["buffer_names"]).__contains__)
        shapes = content.get("frozen_param_shapes") or {}
        for name, part in (content.get("frozen_param_fragments") or {}).items():
            index = shards.even(name, tuple(shapes[name]), number)
            if index is not None:
                catalog.add_module(_fragment(index, part.reshape(-1)[: index.numel], path))


def _add_stage3(catalog: Catalog, shards: _Shards, optims: Sequence[Path], source: UpstreamFolder) -> None:
    """Add the optimizer state: each sub-group has the shards of consecutive parameters on a data-parallel rank."""
    groups = [list(group.items()) for group in shards.part.content["param_shapes"]]
    for number, path in enumerate(optims):
        state = source.read(path)[OPTIMIZER_STATE]
        inner = state[OPTIMIZER_STATE]
        params = (item for group in groups for item in group)
        for place, masters in enumerate(state["fp32_flat_groups"]):
            flat = {MASTER: masters, **inner["state"].get(place, {})}
            position = 0
            while position < masters.numel():
                name, shape = next(params)
                index = shards.even(name, tuple(shape), number)
                if index is not None:
                    _add_slices(catalog, index, flat, position, path)
                position += -(-prod(shape) // len(shards.contents))
        if not catalog.groups:
            catalog.groups = param_groups(
                inner["param_groups"], [[name for name, _ in group] for group in groups]
            )
            catalog.scalars = _scalars(state.get("loss_scaler"))


# Stage 0 ---------------------------------------------------------------------------------------------------


def _add_whole(catalog: Catalog, part: UpstreamPart, order: Order | None) -> None:
    """Add a torch optimizer's state dict by number, with fp32 masters if the weights are 16-bit."""
    optimizer, path, module = part.content["optimizer"], part.path, part.content["module"]
    inner = optimizer.get(OPTIMIZER_STATE, optimizer)
    numbers: list[list[int]] = [list(group["params"]) for group in inner["param_groups"]]
    masters: Sequence[Any] = optimizer.get("fp32_groups") or optimizer.get("fp32_groups_flat") or []
    if order is None:
        return  # only weights are wanted; they are in the model file
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
            else:  # an expert, whose weights are in a separate file
                saved = catalog.module[name][0]
                held, shape, index = saved.data, saved.index.global_shape, saved.index
            if index is None:
                continue
            state = dict(inner["state"].get(numbers[number][position], {}))
            state[MASTER] = masters[number][position] if masters else held
            for kind, value in state.items():
                if isinstance(value, Tensor) and (value.dim() or not shape) and value.numel() == index.numel:
                    catalog.add_fragment(kind, _fragment(index, value, path))
                elif value is not None:
                    catalog.values.setdefault(name, {})[kind] = value
    if not catalog.groups:
        catalog.groups = param_groups(inner["param_groups"], names)
        catalog.scalars = _scalars(optimizer)


def _named(group: Sequence[str], numbers: list[int], catalog: Catalog, path: Path) -> list[str]:
    """Return the names for the numbers of one group, in the same order, without empty tensors, which 16-bit
    optimizers drop."""
    names = [name for name in group if catalog.find([name])]
    if len(names) != len(numbers):
        names = [name for name in names if catalog.module[name][0].index.numel]
    if len(names) != len(numbers):
        raise CheckpointError(
            f"{path} has a group of {len(numbers)} parameters, but the optimizer's has {len(group)}"
        )
    return names


# Shared by all stages --------------------------------------------------------------------------------------


def _fragment(index: ShardIndex, value: Tensor, path: Path) -> SavedFragment:
    return SavedFragment(index, value.detach().reshape(-1), _unhashed(path))


@functools.lru_cache(1024)
def _unhashed(path: Path) -> Archive:
    """Return an archive without hashes: that release writes none."""
    return Archive(path, {}, 0)


def _scalars(scaler: Any) -> dict[str, Any]:
    """Return the loss scale from the pickled scaler's attributes, or from the keys that stage 0 has instead."""
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
    """Return the files of ranks 0 to ``count - 1``, in that order; files of an earlier, larger run are ignored."""
    by_rank = {(optim_ranks(path.name) or (0, 0))[0]: path for path in optims}
    missing = [rank for rank in range(count) if rank not in by_rank]
    if missing and optims:
        raise CheckpointNotFoundError(
            f"{folder} lacks the optimizer file of rank {missing[0]} ({len(missing)} of {count} are missing)"
        )
    return [by_rank[rank] for rank in range(count)] if optims else []


def _as_list(value: Any) -> list[int]:
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else [int(value)]
