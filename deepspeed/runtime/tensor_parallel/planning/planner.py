"""The plan of a model: from its graph, what was asked for, and what its author says."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from deepspeed.runtime.tensor_parallel.planning.attributes import changes
from deepspeed.runtime.tensor_parallel.planning.checking import Misfit, find_misfit
from deepspeed.runtime.tensor_parallel.planning.gradients import find_sums
from deepspeed.runtime.tensor_parallel.planning.plan import (
    ArgumentChange,
    ParameterPlan,
    PlanError,
    TensorParallelPlan,
    VocabularyPlan,
)
from deepspeed.runtime.tensor_parallel.planning.solving import Solution, kind_of, solve
from deepspeed.runtime.tensor_parallel.planning.trace import (
    Trace,
    TraceError,
    example_inputs,
    trace,
    twin_on_paper,
)
from deepspeed.runtime.tensor_parallel.planning.vocabulary import find_vocabulary

_ATTEMPTS = 10
_SAID = "you said so"


def plan_module(
    module: nn.Module,
    ranks: int,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    whole: Sequence[str] = (),
    grain: int = 1,
) -> TensorParallelPlan:
    """How ``ranks`` ranks share ``module``: from one run of it on paper, without communication, the same on all ranks.

    Args:
        inputs: arguments for the run, on the meta device; by default made for a model of Transformers.
        whole: names of parameters that are not to be split.
        grain: see ``tensor_parallel.tp.tp_grain_size``.

    Raises:
        PlanError: the model cannot be followed, or its parts contradict each other.
    """
    try:
        twin = twin_on_paper(module)
        followed = trace(twin, inputs if inputs is not None else example_inputs(twin))
    except TraceError as error:
        raise PlanError(f"the forward of {type(module).__name__} could not be followed: {error}") from error
    reasons = dict.fromkeys(whole, _SAID)
    fixed: set[str] = set()
    for _ in range(_ATTEMPTS):
        solution = solve(followed, ranks, whole=reasons, grain=grain)
        plan = plan_of(followed, solution, ranks, fixed)
        misfit = find_misfit(followed, solution, plan)
        if misfit is None:
            named = {name for name, why in reasons.items() if why == _SAID}
            vocabulary = find_vocabulary(followed, ranks, named)
            return replace(plan, vocabulary=vocabulary, whole=_without(plan.whole, vocabulary))
        _give_up_part(misfit, plan, fixed, reasons)
    raise PlanError(f"no plan was found in {_ATTEMPTS} attempts")


def _without(whole: Mapping[str, str], vocabulary: Sequence[VocabularyPlan]) -> dict[str, str]:
    split = {each.weight for each in vocabulary}
    return {name: why for name, why in whole.items() if name not in split}


def _give_up_part(misfit: Misfit, plan: TensorParallelPlan, fixed: set[str], reasons: dict[str, str]) -> None:
    """Leave the numbers of the module where ``misfit`` was found, and of its like in other layers, as they are; and if
    they are, leave its weights whole."""
    like = kind_of(misfit.path)
    paths = {name.rsplit(".", 2)[0] for name in plan.parameters if name.count(".") > 1}
    paths = {path for path in paths if kind_of(path) == like}
    changed = {change.module for change in plan.attributes} & paths
    if not paths:
        raise PlanError(f"a part of the model does not run: {misfit.text}")
    if changed:
        fixed |= changed
        return
    for name in plan.parameters:
        if name.rsplit(".", 2)[0] in paths:
            reasons[name] = "a part of it does not run"


def plan_of(run: Trace, solution: Solution, ranks: int, fixed: Container[str] = ()) -> TensorParallelPlan:
    """From what can be split to what is done. ``fixed``: paths of modules whose numbers stay."""
    sums = find_sums(run, solution.followed)
    parameters: dict[str, ParameterPlan] = {}
    inputs: dict[str, str | None] = {}
    biases = {
        weight: bias for kind, weight, bias in solution.followed.linears.values() if kind == "column" and bias
    }
    for region in solution.regions:
        reason = f"{len(region.groups)} independent groups of channels"
        linear = {axis[0] for axis in region.columns} | {biases.get(axis[0]) for axis in region.columns}
        for axis, cut in region.cuts.items():
            kind = "row" if axis in region.rows else "column" if axis[0] in linear else "sliced"
            if axis[0] in parameters:
                raise PlanError(f"{axis[0]} would be cut twice")
            parameters[axis[0]] = ParameterPlan(kind, cut, reason)
        for weight, _ in region.columns:
            path = weight.rpartition(".")[0]
            inputs[path] = _shared_name(path, sums.inputs.get(weight))
    return TensorParallelPlan(
        ranks=ranks,
        source="its graph",
        parameters=parameters,
        inputs=inputs,
        outputs_summed=tuple(dict.fromkeys(weight.rpartition(".")[0] for weight in sums.outputs)),
        summed=tuple(dict.fromkeys(sums.params)),
        attributes=changes(run.twin, solution.regions, solution.followed, solution.soft, fixed),
        arguments=tuple(
            ArgumentChange(*name.split(":"), cut)
            for region in solution.regions
            for name, cut in region.arguments.items()
        ),
        whole=solution.whole,
    )


def _shared_name(path: str, input_name: str | None) -> str | None:
    """Layers of one block (also inside of adapters) that have the same input share its sum."""
    block = re.match(r".*\.\d+(?=\.)", path)
    owner = block.group() if block else path.rpartition(".")[0]
    return None if input_name is None else f"{owner}:{input_name}"
