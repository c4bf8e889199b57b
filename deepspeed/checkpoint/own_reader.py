"""Our own checkpoints: the first model file lists the contents, and the others are opened as needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from deepspeed.checkpoint import names
from deepspeed.checkpoint.archive import Archive, open_archive
from deepspeed.checkpoint.catalog import Catalog, Source
from deepspeed.checkpoint.directory import TABLES, Directory
from deepspeed.checkpoint.directory import read as read_directory
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.names import CHECKSUMS, DS_VERSION, FORMAT, INDEX, OPTIMIZER_STATE, RESERVED_KEYS
from deepspeed.checkpoint.own_format import (
    DIRECTORIES,
    OPTIMIZER_DIRECTORY,
    PARTS_DIRECTORY,
    unpack_groups,
    unpack_section,
)
from deepspeed.checkpoint.shards import ShardIndex


class OwnReader:
    """``catalog`` has the first model file's content from the start; ``fetch`` adds fragments of the other files.

    ``optimizer=False`` does not open the optimizer's files if the weights are elsewhere. ``partial`` accepts that
    files of other ranks are on other nodes.
    """

    def __init__(self, head: Archive, *, optimizer: bool, partial: bool) -> None:
        self.head = head
        self.folder = head.path.parent
        self.partial = partial
        self.index = head.content[INDEX]
        self._check_format()
        head.verify_rest(_large_tensors(head.content))
        self._open: dict[str, Archive] = {head.path.name: head}
        self._unpacked: set[str] = set()
        self.optim_files, self.part_files = self._file_names()
        self.sharded_weights = self.index["part_files"] is not None
        self.reads_optimizer = self.index["optimizer"] is not None and (optimizer or self.sharded_weights)
        self.catalog = self._catalog()
        _add_module(self.catalog, head)
        self.directories = self._directories()
        if self.index["optimizer"] == "model file" and self.reads_optimizer:
            self._add_section(head, head.content["optimizer"])

    def _check_format(self) -> None:
        if self.index["format"] > FORMAT:
            raise CheckpointError(
                f"{self.head.path} has format {self.index['format']}, written by release "
                f"{self.head.content[DS_VERSION]}; this one reads up to {FORMAT}: upgrade"
            )

    def _file_names(self) -> tuple[list[str], list[str]]:
        """Names of the optimizer's files, and of those with parts of weights, by number."""
        optim, parts = self.index["optimizer"], self.index["part_files"]
        if self.index["format"] == 1:
            return (optim if isinstance(optim, list) else [], parts or [])
        ranks = names.dp_mp_ranks(*self.index["dp_mp_sizes"])
        bf16 = self.index["bf16"]
        return (
            [names.optim_file(dp, mp, bf16=bf16) for dp, mp in ranks] if optim == "optimizer files" else [],
            [names.zero_model_file(dp, mp) for dp, mp in ranks] if parts is not None else [],
        )

    def _catalog(self) -> Catalog:
        first = self.head.content
        catalog = Catalog(
            folder=self.folder,
            written_by=first[DS_VERSION],
            zero_stage=self.index["zero_stage"],
            aliases=dict(self.index["aliases"]),
            model_states={
                k: v for k, v in first.items() if k in RESERVED_KEYS and k not in ("module", CHECKSUMS)
            },
            client_state={key: value for key, value in first.items() if key not in RESERVED_KEYS},
            index=self.index,
            files=self,
        )
        catalog.has_optimizer = self.index["optimizer"] is not None
        return catalog

    def _directories(self) -> dict[str, Directory]:
        """By index key, with the parameter names that each covers."""
        packed = {key: self.index.get(key) for key in DIRECTORIES}
        made = {
            key: read_directory(value, self.head.verify) for key, value in packed.items() if value is not None
        }
        if self.reads_optimizer and OPTIMIZER_DIRECTORY in made:
            for name, kinds in made[OPTIMIZER_DIRECTORY].kinds.items():
                self.catalog.fragments.setdefault(name, {kind: [] for kind in kinds})
        for name in made[PARTS_DIRECTORY].shapes if PARTS_DIRECTORY in made else ():
            self.catalog.module.setdefault(name, [])
        return made

    # Other files --------------------------------------------------------------------------------------------

    def fetch(self, shards: Sequence[ShardIndex] | None, prefer: int = 0) -> None:
        """Open the files that hold ``shards``; all files for None, or if there is no directory."""
        if self.sharded_weights:
            for name in self._needed(PARTS_DIRECTORY, self.part_files, shards, prefer):
                self._add_parts(self._archive(name))
        if not self.reads_optimizer or not self.optim_files:
            return
        for name in self._needed(OPTIMIZER_DIRECTORY, self.optim_files, shards, prefer):
            if name not in self._unpacked:
                self._unpacked.add(name)
                self._add_section(self._archive(name), self._archive(name).content[OPTIMIZER_STATE])
        if not self.catalog.groups:  # a rank that owns nothing
            name = self.optim_files[prefer % len(self.optim_files)]
            self.catalog.groups = unpack_groups(self._archive(name).content[OPTIMIZER_STATE])
            self.catalog.scalars = dict(self._archive(name).content[OPTIMIZER_STATE]["scalars"])

    def _needed(
        self, directory: str, files: list[str], shards: Sequence[ShardIndex] | None, prefer: int
    ) -> list[str]:
        if shards is None or directory not in self.directories:
            return self.present(files)
        numbers = {n for shard in shards for n in self.directories[directory].files(shard, prefer)}
        return [files[number] for number in sorted(numbers)]

    def present(self, files: Iterable[str]) -> list[str]:
        """Those of ``files`` that are in the folder. CheckpointNotFoundError: a required one is missing."""
        found = {entry.name for entry in self.folder.iterdir()}
        missing = [name for name in files if name not in found]
        if missing and not self.partial:
            raise CheckpointNotFoundError(
                f"{self.folder / missing[0]} is missing ({len(missing)} of {len(list(files))} optimizer files are); "
                "load_module_only=True loads the weights alone"
            )
        return [name for name in files if name in found]

    def check_complete(self) -> None:
        """One of the loading ranks checks that all files are there."""
        self.present(self.part_files)
        if self.reads_optimizer:
            self.present(self.optim_files)

    def _archive(self, name: str) -> Archive:
        """Open and verified, except for what is verified as it is read."""
        if name not in self._open:
            archive = open_archive(self.folder / name)
            if not isinstance(archive.content, dict):
                raise CheckpointError(f"{archive.path} does not hold the states of a checkpoint")
            archive.verify_rest(_large_tensors(archive.content))
            self._open[name] = archive
        return self._open[name]

    def _add_section(self, archive: Archive, section: dict[str, Any]) -> None:
        if not self.catalog.groups:
            self.catalog.groups = unpack_groups(section)
            self.catalog.scalars = dict(section["scalars"])
        unpack_section(section, archive, self.catalog)

    def _add_parts(self, archive: Archive) -> None:
        """This file's parts of weights that no optimizer holds (stage 3)."""
        key = f"parts of {archive.path.name}"
        if key in self._unpacked:
            return
        self._unpacked.add(key)
        parts = (archive.content["frozen_param_fragments"] or {}).values()
        for entry, part in zip(archive.content[INDEX]["parts"], parts, strict=True):
            self.catalog.add_module(Source(ShardIndex(*entry), flat(part), archive))

    # What differs from rank to rank ---------------------------------------------------------------------------

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        states = self.index.get("rank_states")
        if states is not None:
            return states[min(rank, len(states) - 1)] if states else None
        files = self.optim_files or self.part_files
        return self._archive(files[min(rank, len(files) - 1)]).content[INDEX].get("rank_state")


def _add_module(catalog: Catalog, head: Archive) -> None:
    """Add weights and buffers as sources. Parameters spread over several files are left to ``_add_parts``."""
    index = head.content[INDEX]
    cut = set(index["cut"])
    for name, value in head.content["module"].items():
        if not isinstance(value, Tensor):
            catalog.extra[name] = value
            continue
        catalog.module_dtypes[name] = value.dtype
        if name in cut:
            continue
        shape, boxes = index["module_boxes"].get(name, (tuple(value.shape), ()))
        held = ShardIndex(name, tuple(shape), boxes, 0, value.numel())
        catalog.add_module(Source(held, flat(value), head))


def _large_tensors(content: dict[str, Any]) -> list[Tensor]:
    """Tensors that are read in parts, or not at all, and verified when they are read."""
    index = content.get(INDEX) or {}
    found = [*(content.get("module") or {}).values(), *(content.get("frozen_param_fragments") or {}).values()]
    for section in (content.get("optimizer"), content.get(OPTIMIZER_STATE)):
        found += [run["data"] for run in section["tensors"]] if section else []
    for key in DIRECTORIES:
        directory = index.get(key) or {}
        found += [directory[table] for table in TABLES if table in directory]
    return [value for value in found if isinstance(value, Tensor)]


def flat(tensor: Tensor) -> Tensor:
    """1-D view of a loaded tensor; transposed ones are laid out again."""
    return tensor.detach().reshape(-1)
