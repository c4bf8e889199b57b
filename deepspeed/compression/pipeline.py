"""Compression of pipeline-parallel models.

Patterns are matched against the whole model on the meta device, and each stage prepares the matches that it holds. The
stages thus agree on what a config means, and a name denotes the same module for any number of stages. A pruner, which
ranks the weights of all modules together, communicates with all stages.
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
CrossStage = list[tuple[str, str, list[str]]]
"""(technique, module, related modules), of which this stage holds some but not all."""


def methods_here(
    model: nn.Module, look_up: Callable[[nn.Module], Methods], has: Callable[[nn.Module], bool]
) -> tuple[Methods, CrossStage]:
    """Return the part on this rank of what ``look_up`` finds in the whole of ``model`` (rows of
    `get_compress_methods`). ``has``: whether a module is the real one, not a stand-in for one of another stage.

    A module whose related modules are on other stages gets a row without them, and they get one without techniques.
    """
    if not isinstance(model, Staged):
        return look_up(model), []
    here = {name for name, module in model.named_modules() if has(module)}
    methods: Methods = []
    cross_stage: CrossStage = []
    for row in look_up(model.whole_meta()):
        methods += [each for each in _rows_here(row, here) if any(each[0])]
        cross_stage += _cross_stage(row, here)
    return methods, cross_stage


def _related_to(row: Sequence[Any]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (index of the pattern, module, its related modules)."""
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


def _cross_stage(row: Sequence[Any], here: set[str]) -> CrossStage:
    [technique] = row[2]
    return [
        (technique, name, others)
        for _, name, others in _related_to(row)
        if {name, *others} & here and not {name, *others} <= here
    ]


def check_same_stage(cross_stage: CrossStage, remedy: str) -> None:
    """Raise ValueError with ``remedy`` if ``cross_stage`` has entries."""
    if cross_stage:
        _, name, others = cross_stage[0]
        raise ValueError(
            f"{name} and the related {', '.join(others)} are on different stages of the pipeline: {remedy}"
        )


class GlobalTopK:
    """Applies ``top_mask`` to the scores of all stages, for a pruner: the choice that a single process would make.

    ``order``: module names of the whole model, the order in which ties between equal scores are broken. Collective
    over ``ranks``, one per stage.
    """

    def __init__(self, ranks: Communicator, order: Sequence[str], device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self._places = {name: place for place, name in enumerate(order)}
        self._everyone: list[dict[str, int]] = []
        """Per stage: module name -> number of its scores."""

    def __call__(self, parts: Mapping[str, Tensor], share: float) -> list[Tensor]:
        """Return masks of the scores in ``parts`` (this stage's, flat, by module) that are among the largest."""
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
