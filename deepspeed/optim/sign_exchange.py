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

    def match(self, masters: Sequence[Tensor], taken: set[int]) -> None:
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
        self.groups: dict[Hashable, ExchangeGroup] = {}

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
        group = self.groups.setdefault(key, ExchangeGroup(ranks.ranks))
        self._admit(group, ranks, masters)
        group.place = ranks.rank
        known = group.starts()
        starts = [known[id(master)] for master in masters]
        assert group.server_error is not None
        group.server_error = group.server_error.to(values[0].device)
        part = group.server_error.numel()
        flat = [[one.float().contiguous() for one in column] for column in (values, errors)]
        flat_values, flat_errors = (Concatenated(column, starts) for column in flat)
        compressed_mean(flat_values, flat_errors, group.server_error, part, ranks, self.codec)
        for column, used in zip((values, errors), flat, strict=True):
            for tensor, copy in zip(column, used, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)

    def _admit(self, group: ExchangeGroup, ranks: Communicator, masters: Sequence[Tensor]) -> None:
        """Append new masters to the group, and redistribute its server errors."""
        known = set(group.members)
        new = [master for master in masters if id(master) not in known]
        if not new and group.server_error is not None:
            return
        before = group.numel
        for master in new:
            place = len(group.members)
            group.members.append(id(master))
            if place == len(group.numels):
                group.numels.append(master.numel())
            elif group.numels[place] != master.numel():  # the checkpoint is of another model
                group.numels[place:] = [master.numel()]
                group.server_error = None
        device = masters[0].device
        part = part_numel(group.numel, ranks.size)
        error = group.server_error
        if error is not None and error.numel() != part:
            whole = torch.empty(error.numel() * ranks.size, device=device)
            ranks.all_gather(whole, error.to(device)).wait()
            error = _own_part(whole[:before], part, ranks)
        group.server_error = torch.zeros(part, device=device) if error is None else error

    def server_errors(self, masters: Sequence[Sequence[Tensor]]) -> dict[int, list[tuple[int, Tensor]]]:
        """Return, by member, the start of the part that this rank serves, and its error. ``masters``: all, to match
        the members of loaded groups that have not travelled since."""
        found: dict[int, list[tuple[int, Tensor]]] = {}
        taken = {member for group in self.groups.values() for member in group.members}
        for key in sorted(self.groups, key=str):  # by kind, as ``masters`` are
            group = self.groups[key]
            if group.server_error is None:
                continue
            group.match(masters[key[0]] if isinstance(key, tuple) else (), taken)
            part = group.server_error.numel()
            begin = group.place * part
            for (member, start), numel in zip(group.starts().items(), group.numels, strict=False):
                low, high = max(begin, start), min(begin + part, start + numel)
                if low < high:
                    error = group.server_error[low - begin : high - begin]
                    found.setdefault(member, []).append((low - start, error))
        return found

    def saved(self) -> dict[Hashable, dict[str, Any]]:
        return {
            key: {
                "ranks": group.ranks,
                "numels": list(group.numels),
                "server_error": group.server_error,
                "place": group.place,
            }
            for key, group in self.groups.items()
        }

    def load(self, saved: Sequence[Mapping[Hashable, Mapping[str, Any]]], rank: int, ranks: int) -> None:
        """``saved[r]``: of rank r. With another number of ranks nothing is loaded."""
        self.groups.clear()
        for key, entry in saved[rank].items() if len(saved) == ranks else ():
            group = self.groups[key] = ExchangeGroup(tuple(entry["ranks"]), list(entry["numels"]))
            group.place = int(entry.get("place", rank))
            group.server_error = entry["server_error"]


def _own_part(whole: Tensor, part: int, ranks: Communicator) -> Tensor:
    padded = whole.new_zeros(part * ranks.size)
    padded[: whole.numel()] = whole
    return padded[ranks.rank * part : (ranks.rank + 1) * part].clone()
