"""Opening a checkpoint folder as a catalog."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import names
from deepspeed.checkpoint.catalog import Catalog
from deepspeed.checkpoint.catalog_reader import CatalogReader, check_save
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError, malformed_as_errors
from deepspeed.checkpoint.files.archive_reader import open_archive, open_states
from deepspeed.checkpoint.foreign.splits import WantedParts
from deepspeed.checkpoint.foreign.upstream_format import open_upstream
from deepspeed.checkpoint.foreign.upstream_parts import Order, UpstreamFolder
from deepspeed.checkpoint.names import DS_VERSION, INDEX, model_ranks, optim_ranks
from deepspeed.checkpoint.renaming import renamed, renaming
from deepspeed.checkpoint.save_ids import FileOfSave, save_of


def open_checkpoint(
    folder: Path,
    *,
    optimizer: bool = True,
    partial: bool = False,
    order: Order | None = None,
    wanted: WantedParts | None = None,
    fetch: bool = True,
    own_names: Collection[str] | None = None,
) -> Catalog:
    """Read the structure of every file in ``folder``, but no tensors.

    ``optimizer=False``: do not open the optimizer's files. ``partial``: files of other ranks may be missing
    (node-local storage). ``order``: names by optimizer group, which checkpoints of release 0.19 at stage 0 lack;
    ``wanted``: the loading model's parts, for tensor-parallel checkpoints that do not describe their cuts.
    ``fetch=False``: open only the first file, if it lists the contents of the others; the caller continues with
    ``Catalog.files``. ``own_names``: names in the loading module, whose wrappers may differ from the saved module's;
    without, names are those of the unwrapped module. CheckpointError names the file that is missing, damaged or
    foreign.
    """
    head = open_states(_head_path(folder))
    first = head.content
    with malformed_as_errors(folder, first.get(DS_VERSION)):
        if INDEX in first:
            catalog = CatalogReader(head, optimizer=optimizer, partial=partial, own_names=own_names).catalog
        else:
            catalog = _open_upstream(folder, first, optimizer, order, wanted, own_names)
        if fetch:
            catalog.files.fetch(None)
        return catalog


def _head_path(folder: Path) -> Path:
    """Return the first model file."""
    for name in (names.model_file(0), names.zero_model_file(0, 0)):
        if (folder / name).is_file():
            return folder / name
    return _files(folder)[0][0]


def first_file_of(folder: Path) -> FileOfSave | None:
    """Return the first model file in ``folder`` with its save; None if there is none."""
    try:
        head = open_archive(_head_path(folder))
        return FileOfSave(head.path, save_of(head.content))
    except FileNotFoundError:  # the reader of the layers names the missing file
        return None


def _open_upstream(
    folder: Path,
    first: dict[str, Any],
    optimizer: bool,
    order: Order | None,
    wanted: WantedParts | None,
    own_names: Collection[str] | None,
) -> Catalog:
    models, optims = _files(folder)
    if "module" not in first or DS_VERSION not in first:
        missing = "module" if "module" not in first else DS_VERSION
        raise CheckpointError(f"{models[0]} was not written by this package: it has no {missing!r}")
    weights_are_there = first["module"] is not None and not names.has_sharded_weights(models[0].name)
    if not optimizer and weights_are_there:
        optims, order = [], None
    rename, read = renaming(first["module"] or (), own_names, ""), _read_dict
    if rename is not None:
        first, read = renamed(first, rename), lambda path: renamed(_read_dict(path), rename)
    return open_upstream(UpstreamFolder(folder, models, optims, first, read, order, wanted))


def read_rank_file(catalog: Catalog, name: str) -> dict[str, Any]:
    """Return the content of one rank's small file, fully verified."""
    archive = open_states(catalog.folder / name)
    check_save(FileOfSave(_head_path(catalog.folder), catalog.index.get(names.SAVE)), archive)
    archive.verify_rest([])
    return {key: value for key, value in catalog.renamed(archive.content).items() if key != INDEX}


def read_pending(catalog: Catalog, rank: int) -> dict[str, Any] | None:
    """Return the accumulated gradients of ``rank``, None unless the checkpoint was saved between two updates."""
    if not catalog.index.get("pending"):
        return None
    return read_rank_file(catalog, names.pending_file(rank))


class SavedRankStates(Sequence[Mapping[str, Any]]):
    """Per-rank optimizer states, indexed by saving rank and read on access."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.saved = int(catalog.index["world_size"]) if catalog.index.get("own_state") else 0

    def __len__(self) -> int:
        return self.saved

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self.saved:
            raise IndexError(rank)
        return materialize(read_rank_file(self.catalog, names.own_state_file(rank)))


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the model files and the optimizer files, each sorted by (mp_rank, dp_rank)."""
    try:
        present = sorted(entry.name for entry in folder.iterdir())
    except NotADirectoryError as error:
        raise CheckpointError(f"{folder} is a file, not a checkpoint folder") from error
    models = {name: ranks for name in present if (ranks := model_ranks(name))}
    optims = {name: ranks for name in present if (ranks := optim_ranks(name))}
    if not models:
        raise CheckpointNotFoundError(f"{folder} holds no *_model_states.pt: it is not a checkpoint folder")
    return (
        [folder / name for name in sorted(models, key=lambda n: models[n][::-1])],
        [folder / name for name in sorted(optims, key=lambda n: optims[n][::-1])],
    )


def _read_dict(path: Path) -> dict[str, Any]:
    return open_states(path).content


def materialize(value: Any) -> Any:
    """Return a deep copy of client data whose tensors do not refer to the file; types, sharing and cycles are kept."""
    return copy.deepcopy(value)
