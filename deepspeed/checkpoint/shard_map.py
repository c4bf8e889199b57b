"""The shard map: which file of a checkpoint holds which interval of a parameter, so that a loader opens only the
files it needs.

One file of each checkpoint contains it, in one of two forms:

- *computed*: three numbers for each parameter. ZeRO shards evenly, and shard ``s`` is in file ``s``, so the files of
  an interval follow by division. Its size and cost do not depend on the world size. Every rank checks that its
  fragments match the numbers.
- *listed*, if some rank's fragments do not: a row for each fragment, gathered from all ranks, for binary search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.shards import ShardCut, ShardIndex

NAME, START, STOP, FILE = range(4)
"""Columns of a row. Rows are sorted by them, in this order."""
TABLES = ("first_rows", "rows")
"""Keys of the tables that are searched, and therefore verified row by row."""


@dataclass(slots=True)
class FileShards:
    """The shards in one rank's file: a row (parameter number, start, stop) and the kinds of state for each."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    kinds: list[tuple[str, ...]] = field(default_factory=list)
    has_boxes: bool = False

    @classmethod
    def of(cls, shards: Iterable[tuple[ShardIndex, Iterable[str]]], names: Sequence[str]) -> FileShards:
        """List a rank's shards with their kinds of state; ``names``: of all parameters, the same on every rank."""
        number = {name: place for place, name in enumerate(names)}
        found = cls()
        for index, kinds in shards:
            found.rows.append((number[index.name], index.start, index.stop))
            found.kinds.append(tuple(kinds))
            found.has_boxes |= bool(index.boxes)
        return found

    def match(self, cuts: Sequence[ShardCut], numels: Sequence[int], file: int) -> bool:
        """Return whether file number ``file`` holds exactly the intervals that the parameters' ``cuts`` imply."""
        if self.has_boxes:
            return False
        found: dict[int, list[tuple[int, int]]] = {}
        for number, start, stop in self.rows:
            if start < stop:
                found.setdefault(number, []).append((start, stop))
        for number, (cut, numel) in enumerate(zip(cuts, numels, strict=True)):
            start, stop = cut.interval(file, numel)
            for low, high in sorted(found.get(number, ())):  # several if the shard is kept in pieces
                if low != start:
                    return False
                start = high
            if start != stop:
                return False
        return True

    def packed(self) -> tuple[Tensor, list[tuple[str, ...]], list[int], bool]:
        """Return a compact form to send: rows as a tensor, each distinct set of kinds once."""
        distinct = list(dict.fromkeys(self.kinds))
        places = {kinds: place for place, kinds in enumerate(distinct)}
        return (
            torch.tensor(self.rows, dtype=torch.int64).view(-1, 3),
            distinct,
            [places[kinds] for kinds in self.kinds],
            self.has_boxes,
        )


def pack_listed(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], ranks: Sequence[Any]
) -> dict[str, Any] | None:
    """Return the listed form of all ``ranks`` (``FileShards.packed`` of each, by file number). None if tensors
    are split into boxes: flat intervals do not show their overlaps."""
    if any(has_boxes for *_, has_boxes in ranks):
        return None
    rows = [
        torch.cat([numbers, torch.full((len(numbers), 1), file, dtype=torch.int64)], dim=1)
        for file, (numbers, *_) in enumerate(ranks)
    ]
    table = torch.cat(rows) if rows else torch.empty(0, 4, dtype=torch.int64)
    for column in (FILE, STOP, START, NAME):
        table = table[torch.argsort(table[:, column], stable=True)]
    kinds: list[dict[str, None]] = [{} for _ in names]
    for numbers, distinct, places, _ in ranks:
        for number, place in zip(numbers[:, NAME].tolist(), places, strict=True):
            kinds[number].update(dict.fromkeys(distinct[place]))
    return {
        "names": list(names),
        "shapes": [tuple(shape) for shape in shapes],
        "kinds": [tuple(entry) for entry in kinds],
        "first_rows": torch.searchsorted(table[:, NAME].contiguous(), torch.arange(len(names) + 1)),
        "rows": table.contiguous(),
    }


@dataclass(frozen=True, slots=True)
class ShardMapInput:
    """One rank's input to the shard map: the parameters known to all ranks, and the shards in this rank's file.

    ``cuts``: None for a parameter that may not be sharded evenly. ``file``: number of this rank's file.
    """

    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    cuts: Sequence[ShardCut | None]
    shards: FileShards
    file: int


def make_shard_map(own: ShardMapInput, ranks: Ranks) -> dict[str, Any] | None:
    """Return the shard map on ranks that write it; None elsewhere, or if none is possible. Collective."""
    computed = _compute(own, ranks)
    if computed is not None:
        return computed
    parameters = (list(own.names), [tuple(shape) for shape in own.shapes])
    alike = ranks.agree(parameters)
    reports = ranks.gather_at_writers((own.file, own.shards.packed(), None if alike else parameters))
    if reports is None:
        return None
    reports = sorted(reports, key=lambda report: report[0])
    if alike:
        return pack_listed(*parameters, [report for _, report, _ in reports])
    return _pack_differing([(report, *described) for _, report, described in reports])


def _pack_differing(reports: Sequence[tuple[Any, list[str], list[tuple[int, ...]]]]) -> dict[str, Any] | None:
    """Pack the reports of ranks with different parameters (pipeline stages), under the union of their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for _, names, own in reports:
        shapes.update(zip(names, own, strict=True))
    number = {name: place for place, name in enumerate(shapes)}
    renumbered = []
    for (rows, distinct, places, has_boxes), names, _ in reports:
        table = torch.tensor([number[name] for name in names], dtype=torch.int64)
        rows = rows.clone()
        rows[:, NAME] = table[rows[:, NAME]]
        renumbered.append((rows, distinct, places, has_boxes))
    return pack_listed(list(shapes), list(shapes.values()), renumbered)


def _compute(own: ShardMapInput, ranks: Ranks) -> dict[str, Any] | None:
    """Return the computed form; None on all ranks if some rank's shards do not match. Messages do not grow with the
    world size."""
    names, shapes = list(own.names), [tuple(shape) for shape in own.shapes]
    cuts = [cut for cut in own.cuts if cut is not None]
    match = len(cuts) == len(names) and own.shards.match(cuts, list(map(prod, shapes)), own.file)
    if not ranks.agree((match, names, shapes, cuts)) or not match:
        return None
    kinds = _kinds_of_all(own, ranks)
    if kinds is None:
        return None
    numbers = [(cut.offset, cut.length, cut.count) for cut in cuts]
    return {"names": names, "shapes": shapes, "kinds": kinds, "cuts": numbers}


def _kinds_of_all(own: ShardMapInput, ranks: Ranks) -> list[tuple[str, ...]] | None:
    """Return the kinds of state that each parameter has on any rank. None if no rank has every kind that occurs."""
    here = list(dict.fromkeys(kind for kinds in own.shards.kinds for kind in kinds))
    known = ranks.longest(here)
    if known is None or ranks.any(not set(here) <= set(known)):
        return None
    width = len(known)
    flags = [False] * (len(own.names) * width)
    for (number, *_), kinds in zip(own.shards.rows, own.shards.kinds, strict=True):
        for kind in kinds:
            flags[number * width + known.index(kind)] = True
    found = ranks.any_each(flags)
    return [
        tuple(kind for place, kind in enumerate(known) if found[number * width + place])
        for number in range(len(own.names))
    ]


class ShardMap:
    """Shapes and kinds of state of the parameters in a map, by name."""

    def __init__(self, packed: Mapping[str, Any]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = dict(zip(packed["names"], packed["shapes"], strict=True))
        self.kinds: dict[str, tuple[str, ...]] = dict(zip(packed["names"], packed["kinds"], strict=True))

    def files(self, shard: ShardIndex, prefer: int) -> set[int]:
        """Return the numbers of the files that hold all saved parts of ``shard``; among replicas, file ``prefer``,
        else the first. For an empty shard, one file that lists its name."""
        raise NotImplementedError


def read_shard_map(packed: Mapping[str, Any], verify: Callable[[Tensor], Any]) -> ShardMap:
    """Read the result of ``make_shard_map``. ``verify`` is called with each part of a table before it is used."""
    return ComputedShardMap(packed) if "cuts" in packed else ListedShardMap(packed, verify)


class ComputedShardMap(ShardMap):
    """The computed form: file numbers by division."""

    def __init__(self, packed: Mapping[str, Any]) -> None:
        super().__init__(packed)
        self._cuts = {name: ShardCut(*cut) for name, cut in zip(self.shapes, packed["cuts"], strict=True)}

    def files(self, shard: ShardIndex, prefer: int) -> set[int]:
        cut = self._cuts.get(shard.name)
        if cut is None:
            return set()
        if not shard.numel:
            return {prefer if prefer < cut.count else 0}
        return set(cut.shards(shard.start, shard.stop))


class ListedShardMap(ShardMap):
    """The listed form: binary search in the rows of all fragments."""

    def __init__(self, packed: Mapping[str, Any], verify: Callable[[Tensor], Any]) -> None:
        super().__init__(packed)
        self._number = {name: number for number, name in enumerate(packed["names"])}
        self._first_rows = packed["first_rows"]
        self._rows = packed["rows"]
        self._verify = verify

    def files(self, shard: ShardIndex, prefer: int) -> set[int]:
        if shard.name not in self._number:
            return set()
        number = self._number[shard.name]
        edges = self._first_rows[number : number + 2]
        self._verify(edges)
        low, high = edges.tolist()
        row = low
        if shard.numel:  # fragments do not overlap, so their ends are sorted
            rows = range(low, high)
            row += bisect_right(rows, shard.start, key=lambda number: self._row(number)[STOP])
        found: dict[tuple[int, int], int] = {}
        while row < high:
            _, start, stop, file = self._row(row)
            if start >= shard.stop and shard.numel:
                break
            if (start, stop) not in found or file == prefer:
                found[start, stop] = file
            if not shard.numel and file == prefer:
                return {prefer}
            row += 1
        return set(found.values()) if shard.numel else set(list(found.values())[:1])

    def _row(self, row: int) -> list[int]:
        entry = self._rows[row]
        self._verify(entry)
        return entry.tolist()
