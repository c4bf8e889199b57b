"""Universal checkpoints, as written by ``ds_to_universal`` of release 0.19 and by ours: whole tensors by name.

    zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt   ``{"param": tensor}``, or, from stage 3, the flat tensor itself
    zero/NAME/step.pt                        a value; from stage 3 it is in the next file instead
    zero/optimizer_state.pt                  the rest of the first rank's optimizer file: groups, loss scale
    *_model_states.pt                        as in the checkpoint that was converted

A parameter's files are opened on demand. There may be folders of weights without optimizer state: frozen weights,
buffers and aliases of tied weights, which the model files hold as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.catalog import Catalog, CatalogFiles, SavedFragment, param_groups
from deepspeed.checkpoint.constants import PARAM, VOCAB_TENSOR
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.files.archive_reader import Archive, open_archive, open_states
from deepspeed.checkpoint.foreign.upstream_parts import UpstreamFolder
from deepspeed.checkpoint.names import MODEL_SUFFIX, OPTIMIZER_STATE, SAVE, SAVED_BY, UNIVERSAL_FOLDER
from deepspeed.checkpoint.save_ids import FileOfSave, check_save_of, save_of
from deepspeed.checkpoint.shards import ShardIndex
from deepspeed.checkpoint.state import MASTER

FOLDER = UNIVERSAL_FOLDER
COMMON = "optimizer_state.pt"
STEP = "step"
SUFFIX = ".pt"


def is_universal(folder: Path) -> bool:
    return (folder / FOLDER).is_dir()


def has_only_parameters(folder: Path) -> bool:
    """Return whether ``folder`` has a weights-only universal checkpoint: no optimizer state and no model files. With
    optimizer state but without model files it is incomplete instead."""
    rest = (folder / FOLDER / COMMON, *folder.glob(f"*{MODEL_SUFFIX}"))
    return is_universal(folder) and not any(path.exists() for path in rest)


@dataclass(eq=False)
class UniversalFiles(CatalogFiles):
    """Adds a parameter's tensors to ``catalog`` on fetch. ``shapes``: of trained parameters, from the model files
    (those of tensor-parallel ranks record the shapes of parts)."""

    catalog: Catalog
    source: UpstreamFolder
    shapes: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        self.folder, self.wanted = self.source.path / FOLDER, self.source.wanted
        self.kinds = _kinds(self.folder)
        self.left = set(self.kinds)

    def fetch(self, shards: Sequence[ShardIndex] | None, prefer: int = 0) -> None:
        """Open the files of the parameters named in ``shards``, or of all for None."""
        names = set(self.kinds) if shards is None else {shard.name for shard in shards}
        for name in sorted(names & self.left):
            self.left.discard(name)
            whole = self.wanted.placements.get(name) if self.wanted is not None else None
            held = _read_parameter(self.folder / name, self.kinds[name])
            for archive in held.values():
                check_save_of(archive.path, archive.content, self.source.first_file, archive.note)
            shape = whole.global_shape if whole is not None else None
            _add_parameter(self.catalog, name, held, self.shapes.get(name), shape)

    def check_complete(self) -> None:
        """Check that every trained parameter has a folder with its master weights."""
        lacking = [name for name in self.shapes if MASTER not in self.kinds.get(name, ())]
        if lacking:
            raise CheckpointNotFoundError(
                f"{self.folder / lacking[0] / (MASTER + SUFFIX)} is missing ({len(lacking)} of "
                f"{len(self.shapes)} parameters are): the conversion is incomplete, rerun it"
            )


def add_universal(
    catalog: Catalog,
    source: UpstreamFolder,
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    common: Mapping[str, Any],
) -> None:
    """Add the master weights and optimizer state of the parameter folders to ``catalog``, which has the content of
    the model files. ``groups``: shapes of trained parameters by optimizer group; ``common``: see ``read_common``."""
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    files = UniversalFiles(catalog, source, shapes)
    catalog.files = files
    for name, kinds in files.kinds.items():
        if name in shapes:
            catalog.fragments[name] = {kind: [] for kind in kinds if kind != STEP}
    _add_groups(catalog, common, [list(group) for group in groups])
    catalog.has_optimizer = bool(catalog.fragments)
    catalog.index = {
        "trained": sorted(shapes),
        "optimizer_order": [list(group.names) for group in catalog.groups],
    }


def open_parameter(folder: Path, name: str, whole: tuple[int, ...]) -> Catalog:
    """Return the catalog of one parameter of shape ``whole``, whose files are in ``folder``."""
    if not (folder / (MASTER + SUFFIX)).is_file():
        raise CheckpointNotFoundError(f"{folder} holds no {MASTER}{SUFFIX}: it is not a parameter's folder")
    catalog = Catalog(folder=folder, written_by="", zero_stage=0)
    held = _read_parameter(folder, _kinds_of(folder))
    _add_parameter(catalog, name, held, None, whole)
    return catalog


def _kinds(folder: Path) -> dict[str, list[str]]:
    return {entry.name: _kinds_of(entry) for entry in sorted(folder.iterdir()) if entry.is_dir()}


def _kinds_of(folder: Path) -> list[str]:
    return sorted(entry.stem for entry in folder.iterdir() if entry.suffix == SUFFIX)


def _read_parameter(folder: Path, kinds: Iterable[str]) -> dict[str, Archive]:
    """Return the files by kind. CheckpointError: they are from two saves."""
    held = {kind: open_archive(folder / f"{kind}{SUFFIX}") for kind in kinds}
    first: FileOfSave | None = None
    for archive in held.values():
        first = check_save_of_same(archive, first)
    return held


def check_save_of_same(archive: Archive, first: FileOfSave | None) -> FileOfSave | None:
    """Raise CheckpointError if ``archive`` is of another save than ``first``; return the first file that records its
    save."""
    if first is None:
        found = save_of(archive.content, archive.note)
        return FileOfSave(archive.path, found) if found else None
    check_save_of(archive.path, archive.content, first, archive.note)
    return first


def saved_by(catalog: Catalog) -> dict[str, Any]:
    """Return an entry for files made from ``catalog`` that names our save; empty if the save is not ours.

    Files of a bare tensor or number carry it as their note (``write_archive``)."""
    save = catalog.index.get(SAVE) or catalog.model_states.get(SAVED_BY)
    return {SAVED_BY: save} if save else {}


def _add_parameter(
    catalog: Catalog,
    name: str,
    held: Mapping[str, Archive],
    recorded: tuple[int, ...] | None,
    wanted: tuple[int, ...] | None,
) -> None:
    """Add a parameter's tensors. ``recorded``: shape in the model files; ``wanted``: shape in the loading model, for
    vocabularies, whose padding depends on the number of ranks."""
    for kind, archive in held.items():
        content = archive.content
        value = content[PARAM] if isinstance(content, dict) else content
        if not isinstance(value, Tensor) or not (value.dim() or kind == MASTER):
            catalog.fragments.get(name, {}).pop(kind, None)
            catalog.values.setdefault(name, {})[kind] = value
            continue
        shape = _shape(archive, value, recorded, wanted)
        catalog.fragments.setdefault(name, {}).setdefault(kind, [])
        rows = value.shape[0] if value.dim() else 0
        padded = isinstance(content, dict) and content.get(VOCAB_TENSOR) and wanted is not None
        if padded and wanted is not None and wanted[1:] == shape[1:] and wanted[0] > rows:
            _add_padded(catalog, name, kind, value, wanted, archive)
        else:
            index = ShardIndex(name, shape, (), 0, value.numel())
            catalog.add_fragment(kind, SavedFragment(index, value.detach().reshape(-1), archive))


def _shape(
    archive: Archive, value: Tensor, recorded: tuple[int, ...] | None, wanted: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the shape of a saved tensor; for a flat one, that of the model files or of the model."""
    if isinstance(archive.content, dict):
        return tuple(value.shape)
    for shape in (recorded, wanted):
        if shape is not None and prod(shape) == value.numel():
            return shape
    if recorded is not None or (wanted is not None and prod(wanted) != value.numel()):
        raise CheckpointError(
            f"{archive.path} holds {value.numel()} elements, expected a tensor of shape {recorded or wanted}"
        )
    return tuple(value.shape)


def _add_padded(
    catalog: Catalog, name: str, kind: str, value: Tensor, whole: tuple[int, ...], archive: Archive
) -> None:
    """Add a vocabulary saved without padding, and zeros for the loading model's padding."""
    rest = tuple((0, size) for size in whole[1:])
    rows = value.shape[0]
    parts = (
        (((0, rows), *rest), value.detach().reshape(-1), archive),
        (
            ((rows, whole[0]), *rest),
            torch.zeros((whole[0] - rows) * prod(whole[1:]), dtype=value.dtype),
            Archive(archive.path, {}, 0),
        ),
    )
    for box, data, source in parts:
        catalog.add_fragment(
            kind, SavedFragment(ShardIndex(name, whole, (box,), 0, data.numel()), data, source)
        )


# State shared by parameters --------------------------------------------------------------------------------------


def read_common(source: UpstreamFolder) -> dict[str, Any]:
    """Return the shared content of the optimizer's files (groups, loss scale); empty if there is none."""
    path = source.path / FOLDER / COMMON
    if not path.is_file():
        return {}
    content = open_states(path, "an optimizer's state").content
    check_save_of(path, content, source.first_file)
    return content


def _add_groups(catalog: Catalog, common: Mapping[str, Any], names: Sequence[Sequence[str]]) -> None:
    """Add hyperparameters by group, and the step if it is not stored per parameter."""
    inner = common.get(OPTIMIZER_STATE) or {}
    saved = common.get("param_groups") or inner.get("param_groups") or []
    if len(saved) != len(names):
        return  # only weights are known by name
    catalog.groups = param_groups(saved, names)
    states = inner.get("state") or {}
    for group, members in zip(saved, names, strict=True):
        values = next((states[number] for number in group.get("params", ()) if number in states), {})
        for kind, value in values.items():
            if not isinstance(value, Tensor) or not value.dim():
                for name in members:
                    catalog.values.setdefault(name, {})[kind] = value
