"""From a checkpoint folder to its catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint import upstream_format
from deepspeed.checkpoint.archive import read_archive
from deepspeed.checkpoint.catalog import Catalog, Source
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.names import (
    DS_VERSION,
    FORMAT,
    INDEX,
    OPTIMIZER_STATE,
    RESERVED_KEYS,
    model_ranks,
    optim_ranks,
    pending_file,
)
from deepspeed.checkpoint.own_format import unpack_groups, unpack_section
from deepspeed.checkpoint.shards import ShardIndex


def open_checkpoint(
    folder: Path, *, optimizer: bool = True, partial: bool = False, order: upstream_format.Order | None = None
) -> Catalog:
    """Read the structure of every file in ``folder``, but no tensor.

    ``optimizer=False`` leaves the optimizer's files alone. ``partial`` accepts that files of other ranks are
    elsewhere (node-local storage). ``order``: names by optimizer group, which checkpoints of release 0.19 at
    stage 0 do not hold. CheckpointError names the file that is missing, damaged or foreign.
    """
    models, optims = _files(folder)
    first = _read_dict(models[0])
    try:
        return _open(folder, models, optims, first, optimizer, partial, order)
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}, written by release {first.get(DS_VERSION)}, is not laid out as its files say "
            f"({type(error).__name__}: {error}); load_module_only=True may still load the weights"
        ) from error


def _open(
    folder: Path,
    models: list[Path],
    optims: list[Path],
    first: dict[str, Any],
    optimizer: bool,
    partial: bool,
    order: upstream_format.Order | None,
) -> Catalog:
    if INDEX in first:
        return _open_own(folder, models, optims, first, optimizer, partial)
    if "module" not in first or DS_VERSION not in first:
        missing = "module" if "module" not in first else DS_VERSION
        raise CheckpointError(f"{models[0]} was not written by this system: it has no {missing!r}")
    weights_are_there = not models[0].name.startswith("zero_")
    if not optimizer and weights_are_there:
        optims, order = [], None
    return upstream_format.open_upstream(folder, models, optims, first, _read_dict, order)


def read_pending(catalog: Catalog, rank: int) -> dict[str, Any] | None:
    """The gradients that ``rank`` had accumulated between two updates, if the checkpoint was taken there."""
    if not catalog.index.get("pending"):
        return None
    return _read_dict(catalog.folder / pending_file(rank))


def _open_own(
    folder: Path,
    models: list[Path],
    optims: list[Path],
    first: dict[str, Any],
    optimizer: bool,
    partial: bool,
) -> Catalog:
    index = first[INDEX]
    if index["format"] > FORMAT:
        raise CheckpointError(
            f"{models[0]} has format {index['format']}, written by release {first[DS_VERSION]}; this one reads up to "
            f"{FORMAT}: upgrade"
        )
    catalog = Catalog(
        folder=folder,
        written_by=first[DS_VERSION],
        zero_stage=index["zero_stage"],
        aliases=dict(index["aliases"]),
        model_states={key: value for key, value in first.items() if key in RESERVED_KEYS and key != "module"},
        client_state={key: value for key, value in first.items() if key not in RESERVED_KEYS},
        index=index,
    )
    if index["part_files"] is not None:
        _check_complete(folder, models, index["part_files"], partial)
    for path in models:
        content = first if path == models[0] else _read_dict(path)
        if path == models[0] or index["part_files"] is None:
            _add_module(catalog, content, path)
        if path.name in (index["part_files"] or ()):
            _add_parts(catalog, content, path)
    catalog.has_optimizer = index["optimizer"] is not None
    weights_are_there = index["part_files"] is None
    if index["optimizer"] is None or not (optimizer or not weights_are_there):
        return catalog
    if index["optimizer"] == "model file":
        sections = [(models[0], first["optimizer"])]
    else:
        _check_complete(folder, optims, index["optimizer"], partial)
        sections = [
            (path, _read_dict(path)[OPTIMIZER_STATE]) for path in optims if path.name in index["optimizer"]
        ]
    for path, section in sections:
        unpack_section(section, path, catalog)
    catalog.groups = unpack_groups(sections[0][1])
    catalog.scalars = dict(sections[0][1]["scalars"])
    return catalog


def _add_module(catalog: Catalog, content: dict[str, Any], path: Path) -> None:
    """Weights and buffers as sources. Parameters of which each file has a part are left to ``_add_parts``."""
    index = content[INDEX]
    sums = iter(index["module_checksums"].tolist())
    cut = set(index["cut"])
    for name, value in content["module"].items():
        if not isinstance(value, Tensor):
            catalog.extra[name] = value
            continue
        total = next(sums)
        catalog.module_dtypes[name] = value.dtype
        if name in cut:
            continue
        shape, boxes = index["module_boxes"].get(name, (tuple(value.shape), ()))
        held = ShardIndex(name, tuple(shape), boxes, 0, value.numel())
        catalog.add_module(Source(held, flat(value), path, total, f"the weights {name} of {path.name}"))


def _add_parts(catalog: Catalog, content: dict[str, Any], path: Path) -> None:
    """This file's parts of weights that no optimizer holds (stage 3)."""
    index = content[INDEX]
    parts = (content["frozen_param_fragments"] or {}).values()
    for entry, part, total in zip(index["parts"], parts, index["part_checksums"].tolist(), strict=True):
        held = ShardIndex(*entry)
        catalog.add_module(Source(held, flat(part), path, total, f"the weights {held.name}"))


def flat(tensor: Tensor) -> Tensor:
    """1-D view of a loaded tensor; transposed ones are laid out anew."""
    return tensor.detach().reshape(-1)


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Model files and optimizer files, each by (mp_rank, dp_rank)."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except NotADirectoryError as error:
        raise CheckpointError(f"{folder} is a file, not a checkpoint folder") from error
    models = {name: ranks for name in names if (ranks := model_ranks(name))}
    optims = {name: ranks for name in names if (ranks := optim_ranks(name))}
    if not models:
        raise CheckpointNotFoundError(f"{folder} holds no *_model_states.pt: it is not a checkpoint folder")
    return (
        [folder / name for name in sorted(models, key=lambda n: models[n][::-1])],
        [folder / name for name in sorted(optims, key=lambda n: optims[n][::-1])],
    )


def _check_complete(folder: Path, present: list[Path], expected: list[str], partial: bool) -> None:
    missing = sorted(set(expected) - {path.name for path in present})
    if missing and not partial:
        raise CheckpointNotFoundError(
            f"{folder / missing[0]} is missing ({len(missing)} of {len(expected)} optimizer files are); "
            "load_module_only=True loads the weights alone"
        )


def _read_dict(path: Path) -> dict[str, Any]:
    content = read_archive(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not the states of a checkpoint")
    return content


def materialize(value: Any) -> Any:
    """A copy of nested client data whose tensors no longer depend on the file."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        copied = [(key, materialize(item)) for key, item in value.items()]
        return type(value)(copied) if type(value) is not dict else dict(copied)
    if isinstance(value, (list, tuple, set)) and type(value) in (list, tuple, set):
        return type(value)(materialize(item) for item in value)
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.dtype)):
        vars(value).update({key: materialize(item) for key, item in vars(value).items()})
    return value
