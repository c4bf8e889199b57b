"""Experts in checkpoints of release 0.19: one weights file per expert, under its global number; their optimizer state
in the files of the ranks that held them, under local numbers.

    layer_1_expert_6_mp_rank_00_model_states.pt    weights of expert 6 of the second MoE layer
    expp_rank_1_mp_rank_00_optim_states.pt         stage 0: the optimizer of the second expert-parallel rank
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.foreign.upstream_parts import UpstreamFolder
from deepspeed.checkpoint.names import DS_CONFIG

_WEIGHTS = re.compile(r"layer_\d+_expert_\d+_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_NAME = re.compile(r"(?P<list>.*\.deepspeed_experts)\.(?P<number>\d+)\.(?P<rest>.*)")
KEYS = frozenset({"num_experts", "ds_autoep_layers"})
"""Keys of the model file about experts."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class SavedExperts:
    """Saved experts. ``files``: weights by file. ``totals``: number of experts by the path of their list.
    ``optimizers``: files by share, i.e. by expert-parallel rank. ``strided``: expert-parallel ranks are not
    adjacent."""

    files: Mapping[Path, Mapping[str, Tensor]] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    optimizers: Sequence[Path] = ()
    strided: bool = False

    @classmethod
    def find(cls, source: UpstreamFolder) -> SavedExperts:
        """Find the experts of a checkpoint. CheckpointError: unsupported experts."""
        paths = sorted(source.path.iterdir())
        found = {path: match for path in paths if (match := _WEIGHTS.fullmatch(path.name))}
        if not found:
            return cls()
        if source.first.get("ds_autoep_layers"):
            raise CheckpointError(
                f"{source.path} was written by release 0.19 with expert_parallel; such checkpoints cannot be "
                "read: export the weights with that release, and load the export"
            )
        if any(int(match[1]) for match in found.values()):
            raise CheckpointError(
                f"{source.path} was written with both experts and model parallelism; such checkpoints cannot be "
                "read"
            )
        files = {path: source.read(path) for path in found}
        shares = {int(match[1]): path for path in paths if (match := _OPTIMIZER.fullmatch(path.name))}
        return cls(
            files,
            _local(name for content in files.values() for name in content),
            [shares[share] for share in sorted(shares)],
            bool((source.first.get(DS_CONFIG) or {}).get("use_data_before_expert_parallelism")),
        )

    def shares(
        self, group: Mapping[str, V], ranks: Sequence[Path]
    ) -> Iterator[tuple[dict[str, V], Sequence[Path]]]:
        """Yield the content of one optimizer group for each share: global names, and the files of the ranks that
        partition it. ``group``: by name on the first rank."""
        local = _local(group)
        counts = {self.totals[path] // number for path, number in local.items()} or {1}
        if len(counts) > 1:
            raise CheckpointError(f"one parameter group holds experts shared by {sorted(counts)} ranks")
        size = counts.pop()
        each = len(ranks) // size
        for share in range(size):
            members = ranks[share * each :][:each] if self.strided else ranks[share::size]
            yield {_renumbered(name, share, local): value for name, value in group.items()}, members

    def order(self, groups: Sequence[Sequence[str]], share: int) -> list[list[str]]:
        """Return the names of one share's optimizer by group, from the loading optimizer's ``groups``: experts were
        in separate groups, and each layer's were divided evenly over the optimizer files."""
        count = max(len(self.optimizers), 1)
        dense = [[name for name in group if not _NAME.fullmatch(name)] for group in groups]
        experts = [[name for name in group if _NAME.fullmatch(name)] for group in groups]
        made = [self._held(group, share, count) for group in experts if group]
        return [group for group, all_of in zip(dense, groups, strict=True) if group or not all_of] + made

    def _held(self, names: Iterable[str], share: int, count: int) -> list[str]:
        made: list[str] = []
        for path, run in groupby(names, lambda name: _parts(name)[0]):
            parts = [_parts(name) for name in run]
            rests = [rest for _, number, rest in parts if number == parts[0][1]]
            local = self.totals.get(path, 0) // count
            made += [f"{path}.{share * local + number}.{rest}" for number in range(local) for rest in rests]
        return made


def _parts(name: str) -> tuple[str, int, str]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return match["list"], int(match["number"]), match["rest"]


def _local(names: Iterable[str]) -> dict[str, int]:
    """Count the experts of each list among ``names``."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if _NAME.fullmatch(name):
            path, number, _ = _parts(name)
            numbers.setdefault(path, set()).add(number)
    return {path: len(each) for path, each in numbers.items()}


def _renumbered(name: str, share: int, local: Mapping[str, int]) -> str:
    if not _NAME.fullmatch(name):
        return name
    path, number, rest = _parts(name)
    return f"{path}.{share * local[path] + number}.{rest}"
