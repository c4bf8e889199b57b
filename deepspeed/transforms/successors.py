"""Successors of parameters that an optimizer may hold already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

PARAMS = "params"


class Successors:
    """For each transform in order: parameter -> those that took its place, and the names of those that it took out."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Mapping[int, Sequence[nn.Parameter]], Mapping[int, str]]] = []
        self._kept: list[nn.Parameter] = []  # while they are here, no other object gets their id

    def add(
        self,
        transform: str,
        became: Mapping[int, Sequence[nn.Parameter]],
        removed: Mapping[str, nn.Parameter],
    ) -> None:
        """``became``: by the id of the parameter before; ``removed``: by name."""
        gone = {id(param): name for name, param in removed.items()}
        self._kept += removed.values()
        self._steps.append((transform, became, gone))

    def followed(self, params: Iterable[Any]) -> list[Any]:
        """``params`` with each parameter replaced by what it became, once.

        ValueError: a transform took one of them out of the module and did not say what it became.
        """
        current = list(params)
        for transform, became, gone in self._steps:
            following: list[Any] = []
            for param in current:
                if id(param) in gone and id(param) not in became:
                    raise ValueError(
                        f"the optimizer holds {gone[id(param)]}, which transform {transform!r} took out of the module "
                        "without saying what it became (context.became)"
                    )
                following.extend(became.get(id(param), (param,)))
            current = list({id(param): param for param in following}.values())
        return current

    def in_parameters(self, given: Sequence[Any] | None) -> list[Any] | None:
        """The argument ``model_parameters`` (parameters or group dicts) as it must be for the transformed module."""
        if given is None or not self._steps:
            return list(given) if given is not None else None
        if not any(isinstance(entry, dict) for entry in given):
            return self.followed(given)
        groups = [
            {**entry, PARAMS: self.followed(_params(entry))}
            if isinstance(entry, dict)
            else {PARAMS: self.followed([entry])}
            for entry in given
        ]
        _check_apart([group[PARAMS] for group in groups])
        return groups

    def in_optimizer(self, optimizer: Any) -> None:
        """Let the groups of a client's optimizer hold the parameters of the transformed module, in place.

        ValueError: it has state for a parameter that is no longer there, or one new parameter is in two groups.
        """
        groups = getattr(optimizer, "param_groups", None)
        if groups is None or not self._steps:
            return
        followed = [self.followed(group[PARAMS]) for group in groups]
        _check_apart(followed)
        staying = {id(param) for params in followed for param in params}
        if any(id(param) not in staying for param in getattr(optimizer, "state", ())):
            raise ValueError(
                "the optimizer has state for parameters that transforms of the module replaced: pass a new optimizer, "
                "or a function that makes one"
            )
        for group, params in zip(groups, followed, strict=True):
            group[PARAMS][:] = params


def _params(group: Mapping[str, Any]) -> list[Any]:
    params = group[PARAMS]
    return [params] if torch.is_tensor(params) else list(params)


def _check_apart(groups: Sequence[Sequence[Any]]) -> None:
    seen: set[int] = set()
    for params in groups:
        ids = {id(param) for param in params}
        if ids & seen:
            raise ValueError(
                "parameters of different optimizer groups became one parameter by a transform of the module: put them "
                "into the same group"
            )
        seen |= ids
