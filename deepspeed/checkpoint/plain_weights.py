"""Weights that are no checkpoint of ours: ``.safetensors`` or ``.bin`` files as Transformers' ``save_pretrained`` and
``save_16bit_model`` write them, in one file or in shards with an index; or a universal checkpoint of nothing but
weights, as ``hf_to_universal`` writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepspeed.checkpoint.archive import Archive, open_archive
from deepspeed.checkpoint.catalog import Catalog, Source
from deepspeed.checkpoint.constants import PARAM
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.export import BIN_NAME, SAFETENSORS_NAME
from deepspeed.checkpoint.renaming import renaming
from deepspeed.checkpoint.shards import ShardIndex
from deepspeed.checkpoint.state import MASTER
from deepspeed.checkpoint.universal_format import FOLDER, SUFFIX, has_only_parameters

INDEX_SUFFIX = ".index.json"


def find_plain(path: Path) -> Path | None:
    """The file with plain weights that ``path`` is, or what the folder ``path`` has of them: such a file, an index of
    several, or the folder of a universal checkpoint's weights."""
    if path.is_file():
        return path if path.suffix in (".safetensors", ".bin") or path.name.endswith(INDEX_SUFFIX) else None
    known = (SAFETENSORS_NAME, BIN_NAME)
    candidates = [name + suffix for name in known for suffix in ("", INDEX_SUFFIX)]
    found = next((path / name for name in candidates if (path / name).is_file()), None)
    return found if found is not None else find_universal_weights(path)


def find_universal_weights(folder: Path) -> Path | None:
    """Where the universal checkpoint in ``folder`` has its parameters, if it holds nothing else."""
    return folder / FOLDER if has_only_parameters(folder) else None


def open_plain(path: Path, tied: Mapping[str, str], own_names: Collection[str]) -> Catalog:
    """The catalog of ``path``, as ``find_plain`` returns it: whole tensors, mapped and not read yet.

    ``own_names``: of the module that loads, which may be wrapped otherwise than the one that was saved. ``tied``: other
    name -> first name of weights that the model has under several names; the file may have any of them.
    CheckpointError: a file that the index names is missing, or cannot be read.
    """
    catalog = Catalog(folder=path.parent, written_by="", zero_stage=0)
    stored = list(_stored(path))
    rename = renaming([name for name, _, _ in stored], own_names, "") or str
    for name, value, archive in ((rename(name), value, archive) for name, value, archive in stored):
        shape = tuple(value.shape)
        catalog.module_dtypes[name] = value.dtype
        catalog.add_module(Source(ShardIndex(name, shape, (), 0, value.numel()), value.reshape(-1), archive))
    saved = catalog.module.keys()
    for alias, name in tied.items():
        present, absent = (name, alias) if name in saved else (alias, name)
        if present in saved and absent not in saved:
            catalog.aliases[absent] = present
    return catalog


def tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of all tensors of ``path``, as ``find_plain`` returns it, file by file."""
    for name, value, _ in _stored(path):
        yield name, value


def _stored(path: Path) -> Iterator[tuple[str, Tensor, Archive]]:
    if path.is_dir():
        for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
            archive = open_archive(folder / (MASTER + SUFFIX))
            yield folder.name, archive.content[PARAM], archive
        return
    for file in _files(path):
        archive = _open(file)
        for name, value in archive.content.items():
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
            raise CheckpointError(f"{path} names {str(part)[:100]!r}, which is not in its folder: not loaded")
    files = [path.parent / part for part in parts]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing:
        raise CheckpointNotFoundError(f"{path} names {missing[0][:100]!r}, which does not exist")
    return files


def _open(file: Path) -> Archive:
    if file.suffix != ".safetensors":
        archive = open_archive(file)
        if not isinstance(archive.content, dict):
            raise CheckpointError(f"{file} holds a {type(archive.content).__name__}, not a model's weights")
        return archive
    try:
        with safe_open(file, framework="pt") as opened:
            return Archive(file, {name: opened.get_tensor(name) for name in opened.keys()}, 0)  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
