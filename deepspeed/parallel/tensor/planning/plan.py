"""The tensor-parallel plan of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from torch import Tensor, nn

from deepspeed.base.exceptions import ExplainedError
from deepspeed.parallel.tensor.cuts import Cut

SplitKind = Literal["column", "row", "sliced"]
T = TypeVar("T")


class PlanError(ExplainedError, ValueError):
    """The plan contradicts itself, the model, or the user's rules."""


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """The ``cut`` of one parameter (under its first name in ``named_parameters``). ``kind``: weight or bias of a
    column-parallel linear layer ("column"), weight of a row-parallel one ("row"), or a parameter of another module
    ("sliced"). ``gather``: gather the outputs of the column layer."""

    kind: SplitKind
    cut: Cut
    reason: str
    gather: bool = False


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """Sets ``module.name`` to ``values[rank]``. ``in_config``: the attribute is in the module's config, and only this
    module's view of it attribute_changes."""

    module: str
    name: str
    values: tuple[int, ...]
    in_config: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentChange:
    """Cuts the argument ``name`` of the forward of ``module`` along ``cut.dim``, whose size is a multiple of
    ``cut.size``: each rank's forward sees its part."""

    module: str
    name: str
    cut: Cut


@dataclass(frozen=True, slots=True)
class VocabularyPlan:
    """A weight [vocabulary, width] split by rows. ``embeddings``, ``heads``: paths of the layers that use it; ``bias``:
    name of the heads' bias, or None."""

    weight: str
    cut: Cut
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """The traced example behind a plan. ``module``: on the meta device, with one block for all identical ones;
    ``inputs``: of its forward, on the meta device; ``buffers``: the user's buffers that have values, by name."""

    module: nn.Module
    inputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """A tensor-parallel plan, equal on all ranks and computed without communication.

    ``parameters``: those that are cut; all others are replicated. ``inputs``: path of a column-parallel layer -> a name
    common to layers with the same input; None: its gradient is summed elsewhere. ``outputs_summed``: paths of
    replicated layers whose output each rank uses for its part: the gradient of the output is summed. ``summed``:
    replicated parameters of which each rank has a partial gradient. ``whole``: why layers stay whole. ``example``: to
    validate the plan; None if the model could not be traced.
    """

    ranks: int
    source: str
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    inputs: Mapping[str, str | None] = field(default_factory=dict)
    outputs_summed: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    attributes: tuple[AttributeChange, ...] = ()
    arguments: tuple[ArgumentChange, ...] = ()
    vocabulary: tuple[VocabularyPlan, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    example: Example | None = field(default=None, compare=False, repr=False)

    def within(self, module: nn.Module) -> TensorParallelPlan:
        """Restrict the plan to ``module``, which has some of the parameters and modules under the same names."""
        params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known = params | {path for path, _ in module.named_modules(remove_duplicate=False)}

        def weighted(layers: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(path for path in layers if f"{path}.weight" in params)

        vocabulary = tuple(
            replace(each, embeddings=weighted(each.embeddings), heads=weighted(each.heads))
            for each in self.vocabulary
            if each.weight in params
        )
        return replace(self.renamed(lambda name: [name] * (name in known)), vocabulary=vocabulary)

    def renamed(self, names: Callable[[str], Sequence[str]]) -> TensorParallelPlan:
        """Return the plan for a model that has each parameter and module under ``names(its name)``: several, or none.
        Vocabularies stay as they are."""

        def every(mapping: Mapping[str, T]) -> dict[str, T]:
            return {new: value for name, value in mapping.items() for new in names(name)}

        inputs: dict[str, str | None] = {}
        for path, shared in self.inputs.items():
            shares = [] if shared is None else names(shared)
            for number, new in enumerate(names(path)):
                inputs[new] = shares[number] if number < len(shares) else shared
        return replace(
            self,
            parameters=every(self.parameters),
            inputs=inputs,
            outputs_summed=tuple(every(dict.fromkeys(self.outputs_summed))),
            summed=tuple(every(dict.fromkeys(self.summed))),
            attributes=tuple(replace(c, module=new) for c in self.attributes for new in names(c.module)),
            arguments=tuple(replace(c, module=new) for c in self.arguments for new in names(c.module)),
            whole=every(self.whole),
        )

    def describe(self) -> str:
        """Summarize the plan for the startup report."""
        kinds = Counter(each.kind for name, each in self.parameters.items() if not name.endswith("bias"))
        split = ", ".join(f"{kinds[kind]} {kind}" for kind in ("column", "row", "sliced") if kinds[kind])
        if self.vocabulary:
            split += f"{', ' if split else ''}vocabulary of {self.vocabulary[0].cut.size} tokens"
        text = f"{split or 'nothing split'} over {self.ranks} ranks, by {self.source}"
        if self.whole:
            reasons = Counter(self.whole.values())
            listed = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common(3))
            text += f"; {len(self.whole)} linear layers stay whole ({listed})"
        return text
