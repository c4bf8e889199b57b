"""Reader of our own checkpoints: the first model file lists the contents, and the others are opened on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint import names
from deepspeed.checkpoint.catalog import Catalog, CatalogFiles, ParamGroup, SavedFragment
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError, mixed_saves
from deepspeed.checkpoint.file_format import (
    OPTIMIZER_MAP,
    PARTS_MAP,
    SHARD_MAPS,
    unpack_groups,
    unpack_section,
)
from deepspeed.checkpoint.files.archive_reader import Archive, open_states
from deepspeed.checkpoint.names import DS_VERSION, FORMAT, INDEX, OPTIMIZER_STATE, RESERVED_KEYS, SAVE
from deepspeed.checkpoint.renaming import WRAPPER, Rename, renamed, renaming
from deepspeed.checkpoint.save_ids import FileOfSave
from deepspeed.checkpoint.shard_map import TABLES, ShardMap, read_shard_map
from deepspeed.checkpoint.shards import ShardIndex, covers, span
from deepspeed.checkpoint.state import MASTER


class CatalogReader(CatalogFiles):
    """Reads our checkpoints: ``catalog`` starts with the first model file's content; ``fetch`` adds fragments of
    other files.

    ``optimizer=False``: do not open the optimizer's files unless they hold weights. ``partial``: files of other ranks
    may be missing (on other nodes).
    """

    def __init__(
        self, head: Archive, *, optimizer: bool, partial: bool, own_names: Iterable[str] | None = None
    ) -> None:
        self.head = head
        self.rename = _renaming(head.content, own_names)
        head.content = self._renamed(head.content)
        self.folder = head.path.parent
        self.partial = partial
        self.index = head.content[INDEX]
        self._check_format()
        head.verify_rest(_large_tensors(head.content))
        self._open: dict[str, Archive] = {head.path.name: head}
        self._unpacked: set[str] = set()
        self.optim_files, self.part_files, self.model_files = self._file_names()
        self.sharded_weights = self.index["part_files"] is not None
        weights_too = self.sharded_weights or self.index.get("weights_in_optimizer_files", False)
        self.reads_optimizer = self.index["optimizer"] is not None and (optimizer or weights_too)
        self.catalog = self._catalog()
        self.shard_maps = self._shard_maps()
        self._add_model_file(head.path.name)

    def _check_format(self) -> None:
        if self.index["format"] > FORMAT:
            raise CheckpointError(
                f"{self.head.path} has format {self.index['format']}, written by release "
                f"{self.head.content[DS_VERSION]}; this release reads up to format {FORMAT}: upgrade"
            )

    def _file_names(self) -> tuple[list[str], list[str], list[str]]:
        """Return the names of the optimizer's files and of the files of sharded weights, both by file number, and of
        the model files, by model-parallel rank."""
        optim, parts = self.index["optimizer"], self.index["part_files"]
        if self.index["format"] == 1:
            return (optim if isinstance(optim, list) else [], parts or [], [self.head.path.name])
        dp_size, mp_size = self.index["dp_mp_sizes"]
        ranks = names.dp_mp_ranks(dp_size, mp_size)
        own_files, bf16 = optim == names.OPTIMIZER_IN_OWN_FILES, self.index["bf16"]
        return (
            [names.optim_file(dp, mp, bf16=bf16) for dp, mp in ranks] if own_files else [],
            [names.zero_model_file(dp, mp) for dp, mp in ranks] if parts is not None else [],
            self._model_file_names(mp_size, sharded=parts is not None),
        )

    def _model_file_names(self, mp_size: int, *, sharded: bool) -> list[str]:
        if not sharded:
            return [names.model_file(mp) for mp in range(mp_size)]
        if self.index.get("stages", 1) > 1:  # each stage has its own buffers and names
            return [names.zero_model_file(0, mp) for mp in range(mp_size)]
        return [self.head.path.name]

    def _catalog(self) -> Catalog:
        first = self.head.content
        catalog = Catalog(
            folder=self.folder,
            written_by=first[DS_VERSION],
            zero_stage=self.index["zero_stage"],
            aliases=dict(self.index["aliases"]),
            model_states={
                k: v for k, v in first.items() if k in RESERVED_KEYS and k not in ("module", names.CHECKSUMS)
            },
            client_state={key: value for key, value in first.items() if key not in RESERVED_KEYS},
            index=self.index,
            files=self,
            renamed=self._renamed,
        )
        catalog.has_optimizer = self.index["optimizer"] is not None
        return catalog

    def _shard_maps(self) -> dict[str, ShardMap]:
        """Return the shard maps by index key; add the parameter names that each covers to the catalog."""
        packed = {key: self.index.get(key) for key in SHARD_MAPS}
        made = {
            key: read_shard_map(value, self.head.verify) for key, value in packed.items() if value is not None
        }
        if self.reads_optimizer:
            held = made[OPTIMIZER_MAP].kinds if OPTIMIZER_MAP in made else {}
            for name in self._covered(OPTIMIZER_MAP, held):
                self.catalog.fragments.setdefault(name, {kind: [] for kind in held.get(name, ())})
        shapes = made[PARTS_MAP].shapes if PARTS_MAP in made else {}
        for name in self._covered(PARTS_MAP, shapes):
            self.catalog.module.setdefault(name, [])
        for name in self.index.get("frozen_elsewhere", ()):
            self.catalog.module.setdefault(name, [])
        return made

    def _covered(self, key: str, listed: Iterable[str]) -> Iterable[str]:
        """Return the names of the parameters in a shard map's files, even if there is no map."""
        return self.index.get("covered", {}).get(key, listed)

    # Other files --------------------------------------------------------------------------------------------

    def fetch(self, shards: Sequence[ShardIndex] | None, prefer: int = 0) -> None:
        """Open the files that hold ``shards``; all files for None. Without a shard map, files are opened in order of
        distance from file number ``prefer`` until every shard is found."""
        if len(self.model_files) > 1:
            wanted = shards if self.index.get("stages", 1) == 1 else None
            for name in self._search(self._near(self.model_files, prefer), wanted, self._held_as_weights):
                self._add_model_file(name)
        if self.sharded_weights:
            for name in self._needed(PARTS_MAP, self.part_files, shards, prefer):
                self._add_parts(self._archive(name))
        if not self.reads_optimizer or not self.optim_files:
            return
        for name in self._needed(OPTIMIZER_MAP, self.optim_files, shards, prefer):
            self._add_optimizer_file(name)
        if not self.catalog.groups:  # a rank that owns no shards
            name = self.optim_files[prefer % len(self.optim_files)]
            self.catalog.groups = unpack_groups(self._archive(name).content[OPTIMIZER_STATE])
            self.catalog.scalars = dict(self._archive(name).content[OPTIMIZER_STATE]["scalars"])

    def _needed(
        self, key: str, files: list[str], shards: Sequence[ShardIndex] | None, prefer: int
    ) -> Iterable[str]:
        if key in self.shard_maps and shards is not None:
            numbers = {n for shard in shards for n in self.shard_maps[key].files(span(shard), prefer)}
            return [files[number] for number in sorted(numbers)]
        covered = self.index.get("covered", {}).get(key)
        if shards is None or covered is None or self.index.get("frozen_elsewhere"):
            return self.present(files)
        held = self._held_as_masters if key == OPTIMIZER_MAP else self._held_as_weights
        wanted = set(covered)
        return self._search(self._near(files, prefer), [s for s in shards if s.name in wanted], held)

    def _search(
        self,
        files: list[str],
        shards: Sequence[ShardIndex] | None,
        held: Callable[[ShardIndex], list[SavedFragment]],
    ) -> Iterator[str]:
        """Yield ``files`` in order until those added so far hold all ``shards``."""
        left = list(shards) if shards is not None else None
        for name in self.present(files):
            if left is not None:
                left = [
                    shard for shard in left if not covers(shard, [source.index for source in held(shard)])
                ]
                if not left:
                    return
            yield name

    def _held_as_weights(self, shard: ShardIndex) -> list[SavedFragment]:
        return self.catalog.module.get(shard.name, [])

    def _held_as_masters(self, shard: ShardIndex) -> list[SavedFragment]:
        return self.catalog.fragments.get(shard.name, {}).get(MASTER, [])

    def _near(self, files: list[str], prefer: int) -> list[str]:
        """Return the file with number ``prefer`` first, then those of its model-parallel rank, then the others."""
        dp_size = self.index["dp_mp_sizes"][0] if self.index["format"] > 1 else len(files)
        if files is self.model_files:
            dp_size, prefer = 1, prefer // max(dp_size, 1)
        numbers = range(len(files))
        return [
            files[n] for n in sorted(numbers, key=lambda n: (n != prefer, n // dp_size != prefer // dp_size))
        ]

    def present(self, files: Iterable[str]) -> list[str]:
        """Return the ``files`` that are in the folder. CheckpointNotFoundError: a required one is missing."""
        found = {entry.name for entry in self.folder.iterdir()}
        missing = [name for name in files if name not in found]
        if missing and not self.partial:
            raise CheckpointNotFoundError(
                f"{self.folder / missing[0]} is missing ({len(missing)} of {len(list(files))} such files are)"
                + (
                    "; load_module_only=True loads the weights alone"
                    if missing[0] in self.optim_files
                    else ""
                )
            )
        return [name for name in files if name in found]

    def check_complete(self) -> None:
        """Check that all files exist; one of the loading ranks calls it."""
        self.present(self.model_files)
        self.present(self.part_files)
        if self.reads_optimizer:
            self.present(self.optim_files)

    def _renamed(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return dict(content) if self.rename is None else renamed(content, self.rename)

    def _archive(self, name: str) -> Archive:
        """Open a file and verify it, except for large tensors, which are verified as they are read."""
        if name not in self._open:
            archive = open_states(self.folder / name)
            check_save(FileOfSave(self.head.path, self.index.get(SAVE)), archive)
            archive.content = self._renamed(archive.content)
            archive.verify_rest(_large_tensors(archive.content))
            self._open[name] = archive
        return self._open[name]

    def _add_model_file(self, name: str) -> None:
        """Add weights and buffers, and the optimizer's section if it is in the same file."""
        if not self._first_time(name):
            return
        archive = self._archive(name)
        _add_module(self.catalog, archive)
        if self.index["optimizer"] == names.OPTIMIZER_IN_MODEL_FILE and self.reads_optimizer:
            self._add_section(archive, archive.content["optimizer"])

    def _add_optimizer_file(self, name: str) -> None:
        if not self._first_time(name):
            return
        archive = self._archive(name)
        section = archive.content[OPTIMIZER_STATE]
        if section["masters_in_module"] and len(self.model_files) > 1:
            place = self.optim_files.index(name) // self.index["dp_mp_sizes"][0]
            self._add_model_file(self.model_files[place])
        self._add_section(archive, section)
        if "module" in archive.content:  # frozen weights that differ by rank
            _add_module(self.catalog, archive)

    def _first_time(self, name: str) -> bool:
        new = name not in self._unpacked
        self._unpacked.add(name)
        return new

    def _add_section(self, archive: Archive, section: dict[str, Any]) -> None:
        if not self.catalog.groups:
            self.catalog.groups = unpack_groups(section)
            self.catalog.scalars = dict(section["scalars"])
        elif self.index.get("stages", 1) > 1:  # each stage names its own parameters
            self.catalog.groups = _joined(self.catalog.groups, unpack_groups(section))
        unpack_section(section, archive, self.catalog)

    def _add_parts(self, archive: Archive) -> None:
        """Add this file's shards of weights without optimizer state (stage 3)."""
        if not self._first_time(f"parts of {archive.path.name}"):
            return
        parts = (archive.content["frozen_param_fragments"] or {}).values()
        for entry, part in zip(archive.content[INDEX]["parts"], parts, strict=True):
            self.catalog.add_module(SavedFragment(ShardIndex(*entry), flat(part), archive))

    # Per-rank state ---------------------------------------------------------------------------

    def rank_state(self, number: int) -> dict[str, Any] | None:
        states = self.index.get("rank_states")
        if states is not None:
            return states[min(number, len(states) - 1)] if states else None
        files = self.optim_files or self.part_files
        return self._archive(files[min(number, len(files) - 1)]).content[INDEX].get("rank_state")


def _same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two sets of options are equal, tensors included."""
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key])
        if isinstance(value, Tensor) and isinstance(second[key], Tensor)
        else value == second[key]
        for key, value in first.items()
    )


def _joined(groups: list[ParamGroup], more: list[ParamGroup]) -> list[ParamGroup]:
    """Merge parameter groups of several pipeline stages into those of the whole model.

    Groups are matched by position if the options agree at each position. Otherwise a stage has no parameters of some
    group, and an optimizer such as Muon made none for it: then groups are matched by the values of their options, and
    unmatched ones are appended.
    """
    found = list(groups)
    pairs = zip(groups, more, strict=False)
    alike = len(groups) == len(more) and all(_same(one.options, other.options) for one, other in pairs)
    for number, group in enumerate(more):
        place = number if alike else _place(group, found)
        if place is None:
            found.append(group)
        else:
            names = tuple(dict.fromkeys(found[place].names + group.names))
            found[place] = replace(found[place], names=names)
    return found


def _place(group: ParamGroup, groups: list[ParamGroup]) -> int | None:
    return next((place for place, each in enumerate(groups) if _same(each.options, group.options)), None)


def check_save(first: FileOfSave, archive: Archive) -> None:
    """Raise CheckpointError unless ``archive`` is of the same save as the folder's ``first`` file."""
    found = (archive.content.get(INDEX) or {}).get(SAVE)
    if (found or {}).get("id") != (first.save or {}).get("id"):
        raise mixed_saves(archive.path, found, *first)


def _renaming(first: Mapping[str, Any], own_names: Iterable[str] | None) -> Rename | None:
    """Return the renaming from saved names to the loading module's, derived from the names in the first file."""
    index = first[INDEX]
    saved = {*(first.get("module") or ()), *(index.get("trained") or ()), *index["aliases"]}
    return renaming(saved, own_names, index.get(WRAPPER, ""))


def _add_module(catalog: Catalog, archive: Archive) -> None:
    """Add weights and buffers as sources. Sharded parameters are left to ``_add_parts``; whole tensors are added
    once."""
    index = archive.content[INDEX]
    cut = set(index.get("cut", ()))
    for name, value in archive.content.get("module", {}).items():
        if not isinstance(value, Tensor):
            catalog.extra.setdefault(name, value)
            continue
        catalog.module_dtypes.setdefault(name, value.dtype)
        if name in cut:
            continue
        shape, boxes = index["module_boxes"].get(name, (tuple(value.shape), ()))
        if boxes or not catalog.module.get(name):
            catalog.add_module(
                SavedFragment(ShardIndex(name, tuple(shape), boxes, 0, value.numel()), flat(value), archive)
            )


def _large_tensors(content: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that may be read only in part, and are verified as they are read."""
    index = content.get(INDEX) or {}
    found = [*(content.get("module") or {}).values(), *(content.get("frozen_param_fragments") or {}).values()]
    for section in (content.get("optimizer"), content.get(OPTIMIZER_STATE)):
        found += [run["data"] for run in section["tensors"]] if section else []
    for key in SHARD_MAPS:
        shard_map = index.get(key) or {}
        found += [shard_map[table] for table in TABLES if table in shard_map]
    return [value for value in found if isinstance(value, Tensor)]


def flat(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a loaded tensor, or a contiguous copy if it is not contiguous."""
    return tensor.detach().reshape(-1)
