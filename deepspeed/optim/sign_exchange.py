"""Average optimizer states over ranks, sent as signs, for the 1-bit optimizers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.comm.compressed import Concatenated, compressed_mean, part_numel
from deepspeed.ops.formats.codecs import Codec, SignCodec

FEEDBACK = "worker_error"
"""State entry of a tensor: the error of encoding this rank's values."""


@dataclass(slots=True)
class ExchangeGroup:
    """Tensors that travel concatenated among the same ranks, in the order in which they were first seen."""

    ranks: tuple[int, ...]
    numels: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    """Ids of the masters; fewer than ``numels`` after loading, until they are seen again."""
    server_error: Tensor | None = None
    """[part] Error of the part that this rank serves."""
    place: int = 0
    """Position of this rank in ``ranks``."""

    @property
    def numel(self) -> int:
        return sum(self.numels)

    def recognise(self, masters: Sequence[Tensor], taken: set[int]) -> None:
        """Find the next members among ``masters`` by size and order. Masters ``taken`` by a group are skipped; found
        ones are added to ``taken``."""
        rest = iter([master for master in masters if id(master) not in taken])
        for numel in self.numels[len(self.members) :]:
            found = next((master for master in rest if master.numel() == numel), None)
            if found is None:
                return
            self.members.append(id(found))
            taken.add(id(found))

    def starts(self) -> dict[int, int]:
        """Return the offset of each member."""
        found, position = {}, 0
        for member, numel in zip(self.members, self.numels, strict=False):
            found[member] = position
            position += numel
        return found


class SignExchange:
    """Averages values with error feedback: the states keep the senders' errors, this object the servers'."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec or SignCodec()
        self.lines: dict[Hashable, ExchangeGroup] = {}

    def mean(
        self,
        key: Hashable,
        ranks: Communicator,
        masters: Sequence[Tensor],
        values: Sequence[Tensor],
        errors: Sequence[Tensor],
    ) -> None:
        """Replace ``values`` by their mean over ``ranks``, up to the errors kept in ``errors``. Collective.

        ``masters`` identify the values; members of the group ``key`` that are missing here count as 0 this time.
        """
        if ranks.size == 1:
            return
        line = self.lines.setdefault(key, ExchangeGroup(ranks.ranks))
        self._admit(line, ranks, masters)
        line.place = ranks.rank
        known = line.starts()
        starts = [known[id(master)] for master in masters]
        assert line.server_error is not None
        line.server_error = line.server_error.to(values[0].device)
        part = line.server_error.numel()
        flat = [[one.float().contiguous() for one in column] for column in (values, errors)]
        lain, owed = (Concatenated(column, starts) for column in flat)
        compressed_mean(lain, owed, line.server_error, part, ranks, self.codec)
        for column, used in zip((values, errors), flat, strict=True):
            for tensor, copy in zip(column, used, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)

    def _admit(self, line: ExchangeGroup, ranks: Communicator, masters: Sequence[Tensor]) -> None:
        """Append new masters to the group, and redistribute its server errors."""
        known = set(line.members)
        new = [master for master in masters if id(master) not in known]
        if not new and line.server_error is not None:
            return
        before = line.numel
        for master in new:
            place = len(line.members)
            line.members.append(id(master))
            if place == len(line.numels):
                line.numels.append(master.numel())
            elif line.numels[place] != master.numel():  # the checkpoint is of another model
                line.numels[place:] = [master.numel()]
                line.server_error = None
        device = masters[0].device
        part = part_numel(line.numel, ranks.size)
        error = line.server_error
        if error is not None and error.numel() != part:
            whole = torch.empty(error.numel() * ranks.size, device=device)
            ranks.all_gather(whole, error.to(device)).wait()
            error = _cut(whole[:before], part, ranks)
        line.server_error = torch.zeros(part, device=device) if error is None else error

    def server_errors(self, groups: Sequence[Sequence[Tensor]]) -> dict[int, list[tuple[int, Tensor]]]:
        """Return, by member, the start of the part that this rank serves, and its error. ``groups``: all masters, to
        recognise the members of loaded groups that have not travelled since."""
        found: dict[int, list[tuple[int, Tensor]]] = {}
        taken = {member for line in self.lines.values() for member in line.members}
        for key in sorted(self.lines, key=str):  # by kind, as ``groups`` are
            line = self.lines[key]
            if line.server_error is None:
                continue
            line.recognise(groups[key[0]] if isinstance(key, tuple) else (), taken)
            part = line.server_error.numel()
            begin = line.place * part
            for (member, start), numel in zip(line.starts().items(), line.numels, strict=False):
                low, high = max(begin, start), min(begin + part, start + numel)
                if low < high:
                    debt = line.server_error[low - begin : high - begin]
                    found.setdefault(member, []).append((low - start, debt))
        return found

    def saved(self) -> dict[Hashable, dict[str, Any]]:
        return {
            key: {
                "ranks": line.ranks,
                "numels": list(line.numels),
                "server_error": line.server_error,
                "place": line.place,
            }
            for key, line in self.lines.items()
        }

    def load(self, saved: Sequence[Mapping[Hashable, Mapping[str, Any]]], rank: int, ranks: int) -> None:
        """``saved[r]``: of rank r. With another number of ranks nothing is owed."""
        self.lines.clear()
        for key, entry in saved[rank].items() if len(saved) == ranks else ():
            line = self.lines[key] = ExchangeGroup(tuple(entry["ranks"]), list(entry["numels"]))
            line.place = int(entry.get("place", rank))
            line.server_error = entry["server_error"]


def _cut(whole: Tensor, part: int, ranks: Communicator) -> Tensor:
    padded = whole.new_zeros(part * ranks.size)
    padded[: whole.numel()] = whole
    return padded[ranks.rank * part : (ranks.rank + 1) * part].clone()
