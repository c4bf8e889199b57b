"""Plain weights: ``.safetensors`` or ``.bin`` files as written by Transformers' ``save_pretrained`` and by
``save_16bit_model``, in one file or in shards with an index; a ``.pt`` or ``.pth`` file of ``torch.save``; or a
weights-only universal checkpoint, as written by ``hf_to_universal``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from deepspeed.checkpoint.catalog import Catalog, SavedFragment
from deepspeed.checkpoint.constants import PARAM
from deepspeed.checkpoint.contents import shared_names
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.export import BIN_NAME, SAFETENSORS_NAME
from deepspeed.checkpoint.files.archive_reader import Archive, open_archive, open_states
from deepspeed.checkpoint.foreign.hub_weights import Conversion, ConvertedGroup
from deepspeed.checkpoint.foreign.universal_format import (
    FOLDER,
    SUFFIX,
    check_save_of_same,
    has_only_parameters,
)
from deepspeed.checkpoint.names import is_ours
from deepspeed.checkpoint.renaming import renaming
from deepspeed.checkpoint.shards import ShardIndex
from deepspeed.checkpoint.state import MASTER

INDEX_SUFFIX = ".index.json"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
NESTED = ("module", "model", "state_dict")
"""Keys under which a file that has more than weights holds these."""


def find_plain(path: Path) -> Path | None:
    """Return ``path`` if it is a file of plain weights, else what the folder ``path`` has: such a file, an index of
    several, or the parameter folder of a weights-only universal checkpoint; None if nothing."""
    if path.is_file():  # a checkpoint's own files are parts of one, and may hold shards
        weights = path.suffix in SUFFIXES and not is_ours(path.name)
        return path if weights or path.name.endswith(INDEX_SUFFIX) else None
    known = (SAFETENSORS_NAME, BIN_NAME)
    candidates = [name + suffix for name in known for suffix in ("", INDEX_SUFFIX)]
    found = next((path / name for name in candidates if (path / name).is_file()), None)
    return found if found is not None else find_universal_weights(path)


def find_universal_weights(folder: Path) -> Path | None:
    """Return the parameter folder of the universal checkpoint in ``folder`` if it is weights-only, else None."""
    return folder / FOLDER if has_only_parameters(folder) else None


def open_plain(path: Path, module: nn.Module, own_names: Collection[str]) -> Catalog:
    """Return the catalog of ``path``, as ``find_plain`` returns it: whole tensors, mapped but not read, named as in
    ``module``. The file may hold a tied weight under any of its names.

    ``own_names``: names in ``module``, whose wrappers may differ from those of the saved module. CheckpointError: a
    file that the index names is missing, or cannot be read.
    """
    catalog = Catalog(folder=path.parent, written_by="", zero_stage=0)
    stored = {name: (value, archive) for name, value, archive in _stored(path)}
    renamed, groups = {name: name for name in stored}, []
    if (conversion := Conversion.of(module)) is not None:
        renamed, groups = conversion.groups({name: value for name, (value, _) in stored.items()})
    rename = renaming(list(renamed.values()), own_names, "") or str

    @lru_cache(maxsize=1)  # the results of one conversion are read consecutively
    def converted(group: ConvertedGroup) -> dict[str, Tensor]:
        for name, _, value in group.stored:
            stored[name][1].verify(value)
        return group.tensors()

    for name, found in renamed.items():
        value, archive = stored[name]
        _add(catalog, value, SavedFragment(_whole(rename(found), value), value.reshape(-1), archive))
    for group in groups:
        archive = Archive(stored[group.stored[0][0]][1].path, {}, 0)
        for name, value in group.tensors(torch.device("meta")).items():
            index = _whole(name, value)
            _add(catalog, value, ConvertedFragment(index, archive, partial(converted, group)))
    saved = catalog.module.keys()
    for alias, name in shared_names(module).items():
        present, absent = (name, alias) if name in saved else (alias, name)
        if present in saved and absent not in saved:
            catalog.aliases[absent] = present
    return catalog


class ConvertedFragment(SavedFragment):
    """A tensor converted from several tensors of a file when it is read.

    Args:
        index: index of the whole tensor.
        archive: the file, for messages.
        read: returns the tensors of the conversion by name.
    """

    __slots__ = ("_read",)

    def __init__(self, index: ShardIndex, archive: Archive, read: Callable[[], dict[str, Tensor]]) -> None:
        for name, value in (("index", index), ("archive", archive), ("_read", read)):
            object.__setattr__(self, name, value)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self._read()[self.index.name].reshape(-1)


def _whole(name: str, value: Tensor) -> ShardIndex:
    return ShardIndex(name, tuple(value.shape), (), 0, value.numel())


def _add(catalog: Catalog, value: Tensor, source: SavedFragment) -> None:
    catalog.module_dtypes[source.index.name] = value.dtype
    catalog.add_module(source)


def tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of all tensors of ``path``, as ``find_plain`` returns it, file by file. Of a file that has
    more than weights, those under a key of ``NESTED``."""
    for name, value, _ in _stored(path):
        yield name, value


def _stored(path: Path) -> Iterator[tuple[str, Tensor, Archive]]:
    if path.is_dir():
        first = None
        for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
            archive = open_archive(folder / (MASTER + SUFFIX))
            first = check_save_of_same(archive, first)
            yield folder.name, archive.content[PARAM], archive
        return
    for file in _files(path):
        archive = _open(file)
        nested = (archive.content.get(key) for key in NESTED)
        content = next((each for each in nested if isinstance(each, dict)), archive.content)
        for name, value in content.items():
            if isinstance(value, Tensor):
                yield name, value, archive


def _files(path: Path) -> list[Path]:
    if not path.name.endswith(INDEX_SUFFIX):
        return [path]
    try:
        parts = [Path(name) for name in dict.fromkeys(json.loads(path.read_text())["weight_map"].values())]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not an index of weights: {type(error).__name__}: {error}"
        ) from error
    for part in parts:
        if part.is_absolute() or ".." in part.parts:
            raise CheckpointError(
                f"{path} names {str(part)[:100]!r}, which lies outside its folder: not loaded"
            )
    files = [path.parent / part for part in parts]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing:
        raise CheckpointNotFoundError(f"{path} names {missing[0][:100]!r}, which does not exist")
    return files


def _open(file: Path) -> Archive:
    if file.suffix != ".safetensors":
        return open_states(file, "a model's weights")
    try:
        with safe_open(file, framework="pt") as opened:
            return Archive(file, {name: opened.get_tensor(name) for name in opened.keys()}, 0)  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
