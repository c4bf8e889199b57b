"""Record of a module's transforms: those requested, results of those that ran, and successors of replaced parameters
that an optimizer may already hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from deepspeed.checkpoint.originals import Originals
    from deepspeed.transforms.inputs import InputTransform

RECORD = "_ds_transforms"
PARAMS = "params"


class Successors:
    """Per transform, in order: parameter -> its replacements, and the names of removed parameters."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Mapping[int, Sequence[nn.Parameter]], Mapping[int, str]]] = []
        self._kept: list[nn.Parameter] = []  # kept alive so that their ids are not reused

    def add(
        self,
        transform: str,
        replaced: Mapping[int, Sequence[nn.Parameter]],
        removed: Mapping[str, nn.Parameter],
    ) -> None:
        """Record one transform. ``replaced``: by id of the replaced parameter; ``removed``: by name."""
        gone = {id(param): name for name, param in removed.items()}
        self._kept += removed.values()
        self._steps.append((transform, replaced, gone))

    def followed(self, params: Iterable[Any]) -> list[Any]:
        """Replace each of ``params`` by its successors, without duplicates.

        ValueError: a transform removed one of them without declaring successors.
        """
        current = list(params)
        for transform, replaced, gone in self._steps:
            following: list[Any] = []
            for param in current:
                if id(param) in gone and id(param) not in replaced:
                    raise ValueError(
                        f"the optimizer holds {gone[id(param)]}, which transform {transform!r} took out of the module "
                        "without declaring its replacement (context.replace_param)"
                    )
                following.extend(replaced.get(id(param), (param,)))
            current = list({id(param): param for param in following}.values())
        return current

    def replace_in_parameters(self, given: Sequence[Any] | None) -> list[Any] | None:
        """Return ``model_parameters`` (parameters or group dicts) for the transformed module."""
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
        _check_groups([group[PARAMS] for group in groups])
        return groups

    def replace_in_optimizer(self, optimizer: Any) -> None:
        """Replace the parameters in a client optimizer's groups by those of the transformed module, in place.

        ValueError: it has state for a removed parameter, or a new parameter would be in two groups.
        """
        groups = getattr(optimizer, "param_groups", None)
        if groups is None or not self._steps:
            return
        followed = [self.followed(group[PARAMS]) for group in groups]
        _check_groups(followed)
        staying = {id(param) for params in followed for param in params}
        if any(id(param) not in staying for param in getattr(optimizer, "state", ())):
            raise ValueError(
                "the optimizer has state for parameters that transforms of the module replaced: pass a new "
                "optimizer, or a function that creates one"
            )
        for group, params in zip(groups, followed, strict=True):
            group[PARAMS][:] = params


def _params(group: Mapping[str, Any]) -> list[Any]:
    params = group[PARAMS]
    return [params] if torch.is_tensor(params) else list(params)


def _check_groups(groups: Sequence[Sequence[Any]]) -> None:
    seen: set[int] = set()
    for params in groups:
        ids = {id(param) for param in params}
        if ids & seen:
            raise ValueError(
                "parameters of different optimizer groups became one parameter by a transform of the module: put them "
                "into the same group"
            )
        seen |= ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformReport:
    """Report of one transform. ``renamed``: number of tensors that exports keep under new names."""

    name: str
    summary: str
    renamed: int = 0

    def line(self) -> str:
        """Format the line for the startup report."""
        note = f"; new names that stay in exports: {self.renamed}" if self.renamed else ""
        return f"transform {self.name}: {self.summary}{note}"


@dataclass(slots=True)
class Transforms:
    """The transforms of one module: those requested, and the results of those that ran.

    ``requested``: each a ``ModuleTransform``.
    ``originals``: how to restore the tensors of the untransformed module, None if no transform ran.
    ``successors``: parameter replacements of the last run. Copies of the module share the transform objects; a pickled
    record keeps only what an export needs.
    """

    requested: list[Any] = field(default_factory=list)
    reports: list[TransformReport] = field(default_factory=list)
    originals: Originals | None = None
    inputs: list[InputTransform] = field(default_factory=list)
    claims: dict[str, str] = field(default_factory=dict)
    successors: Successors = field(default_factory=Successors)

    @property
    def names(self) -> list[str]:
        """Names of the transforms that ran."""
        return [report.name for report in self.reports]

    def record_no_op(self) -> Transforms:
        """Record a start without new transforms; returns the record itself."""
        self.requested.clear()
        self.successors = Successors()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Transforms:
        lists = list(self.requested), list(self.reports), self.originals, list(self.inputs)
        return Transforms(*lists, dict(self.claims))

    def __reduce__(self) -> tuple[Any, ...]:
        return Transforms, ([], self.reports, self.originals, [], self.claims)


def transforms_of(module: nn.Module) -> Transforms:
    """Return the transforms requested for, or applied to, this module; empty if there are none."""
    return vars(module).get(RECORD) or Transforms()
