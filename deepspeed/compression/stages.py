"""Compression of a model of which each rank has one stage of a pipeline.

Patterns are looked up in the whole model, on the meta device, and what they find is prepared where it is. So the stages
agree on what a config asks for, and a name means the same module for any number of stages. What ranks the weights of
all modules together, a pruner, asks all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.base.staged import Staged
from deepspeed.comm.collectives import Communicator
from deepspeed.compression.utils import top_mask

Methods = list[list[Any]]
Parted = list[tuple[str, str, list[str]]]
"""(technique, module, related ones) of which only some are on this stage."""


def methods_here(
    model: nn.Module, look_up: Callable[[nn.Module], Methods], has: Callable[[nn.Module], bool]
) -> tuple[Methods, Parted]:
    """Return the part of what ``look_up`` finds in the whole of ``model`` (rows of `get_compress_methods`) that is on
    this rank. ``has``: whether a module found under a name is the one meant, and no stand-in for one of another stage.

    A module whose related ones are on other stages is in a row without them, and they are in one without techniques.
    """
    if not isinstance(model, Staged):
        return look_up(model), []
    here = {name for name, module in model.named_modules() if has(module)}
    methods: Methods = []
    parted: Parted = []
    for row in look_up(model.whole_meta()):
        methods += [each for each in _rows_here(row, here) if any(each[0])]
        parted += _parted(row, here)
    return methods, parted


def _related_to(row: Sequence[Any]) -> Iterator[tuple[int, str, list[str]]]:
    """(number of the pattern, module, its related ones)."""
    names, related, _ = row
    for i, group in enumerate(names):
        for j, name in enumerate(group):
            yield i, name, [others[j] for others in related[i]] if related else []


def _rows_here(row: Sequence[Any], here: set[str]) -> Iterator[list[Any]]:
    names, related, techniques = row
    together: list[list[tuple[str, list[str]]]] = [[] for _ in names]
    alone: list[str] = []
    followers: list[str] = []
    for i, name, others in _related_to(row):
        if {name, *others} <= here:
            together[i].append((name, others))
            continue
        alone += [name] if name in here else []
        followers += [each for each in others if each in here]
    columns = [
        [list(column) for column in zip(*(others for _, others in group), strict=True)] for group in together
    ]
    yield [[[name for name, _ in group] for group in together], columns if related else [], techniques]
    yield [[alone], [], techniques]
    yield [[followers], [], {}]


def _parted(row: Sequence[Any], here: set[str]) -> Parted:
    [technique] = row[2]
    return [
        (technique, name, others)
        for _, name, others in _related_to(row)
        if {name, *others} & here and not {name, *others} <= here
    ]


def refuse_parted(parted: Parted, remedy: str) -> None:
    """ValueError: there are any."""
    if parted:
        _, name, others = parted[0]
        raise ValueError(
            f"{name} and the related {', '.join(others)} are on different stages of the pipeline: {remedy}"
        )


class ChoiceOfStages:
    """``top_mask`` over the weights of all stages, for a pruner: what one process that has them all would choose.

    ``order``: names of modules in the whole model, the order in which equal scores are taken. Collective over
    ``ranks``, those that have the stages.
    """

    def __init__(self, ranks: Communicator, order: Sequence[str], device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self._places = {name: place for place, name in enumerate(order)}
        self._everyone: list[dict[str, int]] = []
        """Of each stage: name -> how many scores its module has."""

    def __call__(self, parts: Mapping[str, Tensor], share: float) -> list[Tensor]:
        """``parts``: scores of this stage by module, flat. Returns which of them are among the largest."""
        sizes = {name: part.numel() for name, part in parts.items()}
        if not self._everyone:
            self._everyone = [{} for _ in range(self.ranks.size)]
            dist.all_gather_object(self._everyone, sizes, group=self.ranks.group)
        longest = max(sum(each.values()) for each in self._everyone)
        if not longest:
            return []
        own = torch.zeros(longest, device=self.device)
        if parts:
            torch.cat(list(parts.values()), out=own[: sum(sizes.values())])
        scores = torch.empty(self.ranks.size * longest, device=self.device)
        self.ranks.all_gather(scores, own).wait()
        found: dict[str, Tensor] = {}
        for each, row in zip(self._everyone, scores.view(self.ranks.size, longest), strict=True):
            sizes_there = [*each.values(), longest - sum(each.values())]
            for name, part in zip(each, row.split(sizes_there), strict=False):
                found.setdefault(name, part)  # a tied module counts once
        ordered = sorted(found, key=self._places.__getitem__)
        kept = top_mask(torch.cat([found[name] for name in ordered]), share)
        masks = dict(zip(ordered, kept.split([found[name].numel() for name in ordered]), strict=True))
        return [masks[name] for name in parts]
