"""The plan for each weight of a model that tensor-parallel ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from deepspeed.base.exceptions import ExplainedError
from deepspeed.parallel.tensor.cuts import Cut

Kind = Literal["column", "row", "sliced"]


class PlanError(ExplainedError, ValueError):
    """The plan contradicts itself, the model, or what was asked for."""


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """``cut`` of one parameter (named as ``named_parameters`` names it first). ``kind``: the weight or bias of a linear
    layer that gives some of the outputs ("column"), the weight of one that takes some of the inputs ("row"), or a
    parameter of another module ("sliced"). ``gather``: the outputs of the column layer are gathered."""

    kind: Kind
    cut: Cut
    reason: str
    gather: bool = False


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """``module.name`` is ``values[rank]`` from now on. ``in_config``: the attribute of the module's config instead, as
    this module sees it."""

    module: str
    name: str
    values: tuple[int, ...]
    in_config: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentChange:
    """The argument ``name`` of the forward of ``module`` is cut: along ``cut.dim``, which is one or several times
    ``cut.size`` wide, each rank's forward sees its part."""

    module: str
    name: str
    cut: Cut


@dataclass(frozen=True, slots=True)
class VocabularyPlan:
    """One weight [vocabulary, width] whose rows are spread. ``embeddings``, ``heads``: paths of the layers that have
    it; ``bias``: name of the heads' one, None if they have none."""

    weight: str
    cut: Cut
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """Source of a plan. ``module``: on the meta device, with one block for all that are alike; ``inputs``: of its
    forward, on the meta device; ``buffers``: those of the user's module that have values, by name."""

    module: nn.Module
    inputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """The same on all ranks; computed without communication.

    ``parameters``: those that are cut; all others stay whole. ``inputs``: path of a column-parallel layer -> a name
    that layers with the same input share; None: its gradient is summed elsewhere. ``outputs_summed``: paths of layers
    that stay whole, and whose result each rank uses for its own part: the gradient of the result is summed. ``summed``:
    parameters that stay whole, and of which each rank has a part of the gradient. ``whole``: why layers stay whole.
    ``example``: with which the plan can be tried; None if the model could not be followed.
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
        """Return the part of the plan that concerns ``module``, which has some of the parameters and modules by the
        same names.
        """
        params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        paths = {path for path, _ in module.named_modules(remove_duplicate=False)}

        def weighted(layers: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(path for path in layers if f"{path}.weight" in params)

        return replace(
            self,
            parameters={name: each for name, each in self.parameters.items() if name in params},
            inputs={path: name for path, name in self.inputs.items() if path in paths},
            outputs_summed=tuple(path for path in self.outputs_summed if path in paths),
            summed=tuple(name for name in self.summed if name in params),
            attributes=tuple(each for each in self.attributes if each.module in paths),
            arguments=tuple(each for each in self.arguments if each.module in paths),
            vocabulary=tuple(
                replace(each, embeddings=weighted(each.embeddings), heads=weighted(each.heads))
                for each in self.vocabulary
                if each.weight in params
            ),
            whole={name: why for name, why in self.whole.items() if name in params},
        )

    def describe(self) -> str:
        """For the report at the start."""
        kinds = Counter(each.kind for name, each in self.parameters.items() if not name.endswith("bias"))
        split = ", ".join(f"{kinds[kind]} {kind}" for kind in ("column", "row", "sliced") if kinds[kind])
        if self.vocabulary:
            split += f"{', ' if split else ''}vocabulary of {self.vocabulary[0].cut.size} tokens"
        text = f"{split or 'nothing split'} over {self.ranks} ranks, by {self.source}"
        if self.whole:
            reasons = Counter(self.whole.values())
            told = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common(3))
            text += f"; {len(self.whole)} linear layers stay whole ({told})"
        return text
