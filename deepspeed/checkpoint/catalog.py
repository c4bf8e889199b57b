"""The catalog of a checkpoint folder: its content by parameter name, independent of the writer. Nothing is read until
it is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.files.archive_reader import Archive
from deepspeed.checkpoint.shards import ShardIndex, StridedCopy
from deepspeed.checkpoint.state import MASTER


@dataclass(frozen=True, slots=True)
class SavedFragment:
    """One saved fragment: 1-D, mapped from ``archive``."""

    index: ShardIndex
    data: Tensor
    archive: Archive

    @property
    def file(self) -> Path:
        return self.archive.path

    def view(self, copy: StridedCopy) -> Tensor:
        """Return the elements of ``copy``, in its shape."""
        if copy.contiguous:
            return self.data.narrow(0, copy.source_offset, copy.numel)
        offset = self.data.storage_offset() + copy.source_offset
        return self.data.as_strided(copy.shape, copy.source_strides, offset)


class CatalogFiles:
    """Files of a catalog, opened on demand; this class: those of a catalog that is complete when it is made."""

    def fetch(self, shards: Sequence[ShardIndex] | None, prefer: int = 0) -> None:
        """Open the files that hold ``shards`` (None: all files); among replicas, those of file number ``prefer``."""

    def check_complete(self) -> None:
        """Check that no file is missing, else raise CheckpointNotFoundError with its name."""

    def rank_state(self, number: int) -> dict[str, Any] | None:
        """Return the RNG states and the data position saved by rank ``number``, or by the last rank if fewer saved."""
        return None


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """An optimizer group: its hyperparameters and the names of its parameters."""

    options: dict[str, Any]
    names: tuple[str, ...]


def param_groups(saved: Iterable[Mapping[str, Any]], names: Iterable[Iterable[str]]) -> list[ParamGroup]:
    """Return the groups of a torch optimizer's ``param_groups``, with the names of each group's parameters."""
    return [
        ParamGroup({key: value for key, value in group.items() if key != "params"}, tuple(members))
        for group, members in zip(saved, names, strict=True)
    ]


@dataclass(slots=True, kw_only=True)
class Catalog:
    """The content of one checkpoint folder.

    ``module``: weights and buffers as the model's state dict names them, in the model's own dtype. ``module_dtypes``:
    dtypes of all its tensors, in its order, even if only parts were saved. ``fragments``: for each trained parameter,
    by kind (``"fp32"`` for masters, ``"exp_avg"``, ...). ``values``: for each trained parameter, state that is not
    per element, such as ``"step"``. ``extra``: entries of the module's state dict that are not tensors. ``aliases``:
    other name -> name it was saved under. ``model_states``: the documented keys of the model file. ``index``: entries
    that only our files record (for upstream's, those that can be inferred). ``files``: files to open on demand; until
    then ``fragments`` and ``module`` may list names and kinds without sources. ``renamed``: maps the content of one
    rank's file to the names of this catalog.
    """

    folder: Path
    written_by: str
    zero_stage: int
    module: dict[str, list[SavedFragment]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    module_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    fragments: dict[str, dict[str, list[SavedFragment]]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    model_states: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    index: dict[str, Any] = field(default_factory=dict)
    files: CatalogFiles = field(default_factory=CatalogFiles)
    renamed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    has_optimizer: bool = False

    @property
    def buffer_names(self) -> list[str]:
        return list(self.model_states.get("buffer_names") or ())

    def add_fragment(self, kind: str, source: SavedFragment) -> None:
        self.fragments.setdefault(source.index.name, {}).setdefault(kind, []).append(source)

    def add_module(self, source: SavedFragment) -> None:
        self.module.setdefault(source.index.name, []).append(source)

    def trained_names(self) -> set[str]:
        """Return the parameters that were trained when the checkpoint was saved, or before; known before other files
        are open."""
        groups = {name for group in self.groups for name in group.names}
        return groups | set(self.fragments) | set(self.index.get("trained") or ())

    def find(self, names: Iterable[str]) -> str | None:
        """Return the name under which a parameter known by any of ``names`` has its fragments or weights."""
        known = list(names)
        for table in (self.fragments, self.module):
            for name in known:
                for candidate in (name, self.aliases.get(name, name)):
                    if candidate in table:
                        return candidate
        return None

    def masters(self, name: str) -> list[SavedFragment]:
        """Return the sources of a parameter's most precise weights available."""
        return self.fragments.get(name, {}).get(MASTER) or self.module.get(name, [])

    def kinds(self) -> set[str]:
        """Return the kinds of optimizer state that are present for any parameter."""
        kinds = {kind for states in self.fragments.values() for kind in states}
        return (kinds | {key for values in self.values.values() for key in values}) - {MASTER}
