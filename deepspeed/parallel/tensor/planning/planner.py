"""The plan of a model: from its graph, what was asked for, and what its author says."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from deepspeed.parallel.tensor.planning.attributes import changes
from deepspeed.parallel.tensor.planning.checking import Misfit, parts_of
from deepspeed.parallel.tensor.planning.gradients import find_sums
from deepspeed.parallel.tensor.planning.ordering import in_own_order
from deepspeed.parallel.tensor.planning.plan import (
    ArgumentChange,
    Example,
    ParameterPlan,
    PlanError,
    TensorParallelPlan,
    VocabularyPlan,
)
from deepspeed.parallel.tensor.planning.repeated import Repeated, expanded, shorten
from deepspeed.parallel.tensor.planning.rules import Rules, author_rules, confirmed, plan_by_rules
from deepspeed.parallel.tensor.planning.solving import Solution, kind_of, solve
from deepspeed.parallel.tensor.planning.trace import Trace, TraceError, example_inputs, trace, traceable_copy
from deepspeed.parallel.tensor.planning.vocabulary import find_vocabulary

_ATTEMPTS = 10


def plan_module(
    module: nn.Module,
    ranks: int,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    rules: Rules | None = None,
    grain: int = 1,
) -> TensorParallelPlan:
    """Plan how ``ranks`` ranks share ``module``: from one simulated run of it, without communication, the same on all
    ranks.

    Args:
        inputs: arguments for the run, on the meta device; by default made for a model of Transformers.
        rules: what was asked for (``rules_of``). Where the model cannot be followed they are the plan, and without any,
            those of the model's author.
        grain: see ``tensor_parallel.tp.tp_grain_size``.

    Raises:
        PlanError: the model cannot be followed, its parts contradict each other, or it contradicts a rule.
    """
    rules = rules or Rules()
    kept = {**rules.whole, **dict.fromkeys(dict(rules.gathered), "its output is gathered")}
    try:
        followed, repeated = _follow(module, inputs, kept)
    except TraceError as error:
        why = f"the forward of {type(module).__name__} could not be followed: {error}"
        others = rules if rules.rules else author_rules(module, ranks)
        if others is None:
            raise PlanError(f"{why}; tensor_parallel.partition_config can say what to split") from error
        plan = plan_by_rules(module, ranks, others, why)
        return plan if rules.rules else replace(plan, example=_unfollowed(module, inputs, plan))
    plan = confirmed(expanded(_plan_by_graph(followed, ranks, kept, grain), repeated), rules, module)
    return replace(plan, example=Example(followed.module, followed.inputs, _buffers(module)))


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in module.named_buffers(remove_duplicate=False) if not each.is_meta}


def _unfollowed(
    module: nn.Module, inputs: Mapping[str, Tensor] | None, plan: TensorParallelPlan
) -> Example | None:
    """Return what a plan of the author's is tried on: a forward that cannot be followed can be run. None: with what is
    not known."""
    copy = traceable_copy(module)
    shorten(copy, {name for name, _ in module.named_parameters()} - plan.parameters.keys())
    try:
        return Example(copy, inputs if inputs is not None else example_inputs(copy), _buffers(module))
    except TraceError:
        return None


def _follow(
    module: nn.Module, inputs: Mapping[str, Tensor] | None, kept: Container[str]
) -> tuple[Trace, Repeated]:
    """With one block in place of those like it; with all, if the forward counts them."""
    for shortened in (True, False):
        copied = traceable_copy(module)
        repeated = shorten(copied, kept) if shortened else Repeated({})
        if shortened and not repeated.others:
            continue
        try:
            return trace(copied, inputs if inputs is not None else example_inputs(copied)), repeated
        except TraceError:
            if not shortened:
                raise
    raise AssertionError("unreachable")


def _plan_by_graph(followed: Trace, ranks: int, kept: Mapping[str, str], grain: int) -> TensorParallelPlan:
    reasons = dict(kept)
    fixed: set[str] = set()
    for _ in range(_ATTEMPTS):
        solution = solve(followed, ranks, whole=reasons, grain=grain)
        plan = plan_of(followed, solution, ranks, fixed)
        parts = parts_of(followed, solution, plan)
        if not isinstance(parts, Misfit):
            plan = in_own_order(plan, solution, parts)
            vocabulary = find_vocabulary(followed, ranks, kept)
            return replace(plan, vocabulary=vocabulary, whole=_without(plan.whole, vocabulary))
        _give_up_part(parts, plan, fixed, reasons)
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
        attributes=changes(run.module, solution.regions, solution.followed, solution.soft, fixed),
        arguments=tuple(
            ArgumentChange(*name.split(":", 1), cut)  # type: ignore[call-arg]
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
