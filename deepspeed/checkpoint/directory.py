"""Which file of a checkpoint holds which interval of a parameter, so that a loader opens only the files it needs.

One file of each checkpoint contains it. It has a row for each fragment and is searched by bisection, so reading a few
intervals touches a few blocks of it, however many ranks saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.shards import ShardIndex

NAME, START, STOP, FILE = range(4)
"""Columns of a row. Rows are sorted by them, in this order."""
TABLES = ("first_rows", "rows")
"""Keys of what is searched, and so verified piece by piece."""


@dataclass(slots=True)
class Held:
    """What one rank's file holds: a row of three numbers and the kinds of state for each fragment."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    kinds: list[tuple[str, ...]] = field(default_factory=list)
    has_boxes: bool = False

    def packed(self) -> tuple[Tensor, list[tuple[str, ...]], list[int], bool]:
        """In a form that is small to send: numbers as a tensor, each set of kinds once."""
        distinct = list(dict.fromkeys(self.kinds))
        places = {kinds: place for place, kinds in enumerate(distinct)}
        return (
            torch.tensor(self.rows, dtype=torch.int64).view(-1, 3),
            distinct,
            [places[kinds] for kinds in self.kinds],
            self.has_boxes,
        )


def held(shards: Iterable[tuple[ShardIndex, Iterable[str]]], names: Sequence[str]) -> Held:
    """``shards``: a rank's fragments with their kinds; ``names``: those of all parameters, the same on every rank."""
    number = {name: place for place, name in enumerate(names)}
    found = Held()
    for index, kinds in shards:
        found.rows.append((number[index.name], index.start, index.stop))
        found.kinds.append(tuple(kinds))
        found.has_boxes |= bool(index.boxes)
    return found


def pack(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], ranks: Sequence[Any]
) -> dict[str, Any] | None:
    """The directory of what all ``ranks`` hold (``Held.packed`` of each, by file number). None where tensors are split
    into boxes: intervals do not show what overlaps then."""
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


class Directory:
    """Reads what ``pack`` made. ``verify`` is called with each part of the table before it is used."""

    def __init__(self, packed: Mapping[str, Any], verify: Callable[[Tensor], Any]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = dict(zip(packed["names"], packed["shapes"], strict=True))
        self.kinds: dict[str, tuple[str, ...]] = dict(zip(packed["names"], packed["kinds"], strict=True))
        self._number = {name: number for number, name in enumerate(packed["names"])}
        self._first_rows = packed["first_rows"]
        self._rows = packed["rows"]
        self._verify = verify

    def files(self, shard: ShardIndex, prefer: int) -> set[int]:
        """Numbers of the files that hold all saved parts of ``shard``; of replicas, the one in file ``prefer``, or the
        first. For a shard without elements, a file that has its name."""
        if shard.name not in self._number:
            return set()
        number = self._number[shard.name]
        edges = self._first_rows[number : number + 2]
        self._verify(edges)
        low, high = edges.tolist()
        row = self._first_after(low, high, shard.start) if shard.numel else low
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

    def _first_after(self, low: int, high: int, start: int) -> int:
        """The first row whose fragment ends after ``start``: fragments do not overlap, so their ends are sorted."""
        while low < high:
            middle = (low + high) // 2
            if self._row(middle)[STOP] > start:
                high = middle
            else:
                low = middle + 1
        return low

    def _row(self, row: int) -> list[int]:
        entry = self._rows[row]
        self._verify(entry)
        return entry.tolist()
