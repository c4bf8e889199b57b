"""Planning of a model from its graph, the user's rules, and its author's plan."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from deepspeed.parallel.tensor.planning.attributes import attribute_changes
from deepspeed.parallel.tensor.planning.label_rules import weight_of
from deepspeed.parallel.tensor.planning.local_order import in_local_order
from deepspeed.parallel.tensor.planning.part_check import Mismatch, trace_parts
from deepspeed.parallel.tensor.planning.plan import (
    ArgumentChange,
    Example,
    ParameterPlan,
    PlanError,
    TensorParallelPlan,
)
from deepspeed.parallel.tensor.planning.rules import Rules, apply_rules, author_rules, plan_by_rules
from deepspeed.parallel.tensor.planning.solver import Solution, kind_of, solve
from deepspeed.parallel.tensor.planning.trace import Trace, TraceError, example_inputs, trace, traceable_copy
from deepspeed.parallel.tensor.planning.values import FREE, PLAIN, SPLIT, LabelledGraph, source, values_in
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
    """Plan how to split ``module`` over ``ranks`` ranks, from one simulated run, without communication; the result is
    the same on all ranks.

    Args:
        inputs: arguments for the run, on the meta device; by default created for a Transformers model.
        rules: the user's rules (``rules_of``). If the model cannot be traced, they are the plan; without any, the
            author's rules are.
        grain: see ``tensor_parallel.tp.tp_grain_size``.

    Raises:
        PlanError: the model cannot be traced, its parts contradict each other, or it contradicts a rule.
    """
    rules = rules or Rules()
    kept = {**rules.whole, **dict.fromkeys(dict(rules.gathered), "its output is gathered")}
    try:
        traced, repeated = _trace_shortened(module, inputs, kept)
    except TraceError as error:
        why = f"the forward of {type(module).__name__} could not be traced: {error}"
        others = rules if rules.rules else author_rules(module, ranks)
        if others is None:
            raise PlanError(
                f"{why}; choose what to split: tensor_parallel.partition_config, or injection_policy of init_inference"
            ) from error
        plan = plan_by_rules(module, ranks, others, why)
        return plan if rules.rules else replace(plan, example=_untraced_example(module, inputs, plan))
    plan = apply_rules(expand_plan(_plan_by_graph(traced, ranks, kept, grain), repeated), rules, module)
    return replace(plan, example=Example(traced.module, traced.inputs, _buffers(module)))


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in module.named_buffers(remove_duplicate=False) if not each.is_meta}


def _untraced_example(
    module: nn.Module, inputs: Mapping[str, Tensor] | None, plan: TensorParallelPlan
) -> Example | None:
    """Return an example to validate an author's plan: a forward that cannot be traced can still be run. None: no
    inputs are known for it."""
    copy = traceable_copy(module)
    drop_repeated(copy, {name for name, _ in module.named_parameters()} - plan.parameters.keys())
    try:
        return Example(copy, inputs if inputs is not None else example_inputs(copy), _buffers(module))
    except TraceError:
        return None


def _trace_shortened(
    module: nn.Module, inputs: Mapping[str, Tensor] | None, kept: Container[str]
) -> tuple[Trace, RepeatedBlocks]:
    """Trace the model with one block for all identical ones; with all blocks if the forward depends on their number."""
    copied = traceable_copy(module)
    repeated = drop_repeated(copied, kept)
    if repeated:
        with contextlib.suppress(TraceError):
            return trace(copied, inputs), repeated
        copied = traceable_copy(module)
    return trace(copied, inputs), {}


def _plan_by_graph(traced: Trace, ranks: int, kept: Mapping[str, str], grain: int) -> TensorParallelPlan:
    reasons = dict(kept)
    fixed: set[str] = set()
    for _ in range(_ATTEMPTS):
        solution = solve(traced, ranks, whole=reasons, grain=grain)
        plan = plan_of(traced, solution, ranks, fixed)
        parts = trace_parts(traced, solution, plan)
        if not isinstance(parts, Mismatch):
            plan = in_local_order(plan, solution, parts)
            vocabulary = find_vocabulary(traced, ranks, kept)
            split = {each.weight for each in vocabulary}
            whole = {name: why for name, why in plan.whole.items() if name not in split}
            return replace(plan, vocabulary=vocabulary, whole=whole)
        _keep_part_whole(parts, plan, fixed, reasons)
    raise PlanError(f"no plan was found in {_ATTEMPTS} attempts")


def _keep_part_whole(
    mismatch: Mismatch, plan: TensorParallelPlan, fixed: set[str], reasons: dict[str, str]
) -> None:
    """Keep the attributes of the module where ``mismatch`` was found, and of its counterparts in other layers,
    unchanged; if they already are, keep its weights whole."""
    like = kind_of(mismatch.path)
    paths = {name.rsplit(".", 2)[0] for name in plan.parameters if name.count(".") > 1}
    paths = {path for path in paths if kind_of(path) == like}
    changed = {change.module for change in plan.attributes} & paths
    if not paths:
        raise PlanError(f"part of the model does not run: {mismatch.text}")
    if changed:
        fixed |= changed
        return
    for name in plan.parameters:
        if name.rsplit(".", 2)[0] in paths:
            reasons[name] = "part of it does not run"


def plan_of(run: Trace, solution: Solution, ranks: int, fixed: Container[str] = ()) -> TensorParallelPlan:
    """Turn a solution into a plan. ``fixed``: paths of modules whose attributes stay unchanged."""
    sums = find_sums(run, solution.labelled)
    parameters: dict[str, ParameterPlan] = {}
    inputs: dict[str, str | None] = {}
    biases = {
        weight: bias for kind, weight, bias in solution.labelled.linears.values() if kind == "column" and bias
    }
    for region in solution.regions:
        reason = f"{len(region.groups)} independent groups of channels"
        linear = {axis[0] for axis in region.columns} | {biases.get(axis[0]) for axis in region.columns}
        for axis, cut in region.cuts.items():
            kind = "row" if axis in region.rows else "column" if axis[0] in linear else "sliced"
            if axis[0] in parameters:
                raise PlanError(f"{axis[0]} would be split twice")
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
        attributes=attribute_changes(
            run.module, solution.regions, solution.labelled, solution.sharable, fixed
        ),
        arguments=tuple(
            ArgumentChange(*name.split(":", 1), cut)  # type: ignore[call-arg]
            for region in solution.regions
            for name, cut in region.arguments.items()
        ),
        whole=solution.whole,
    )


def _shared_name(path: str, input_name: str | None) -> str | None:
    """Return a name common to layers of one block (also inside adapters) with the same input, which share its sum."""
    block = re.match(r".*\.\d+(?=\.)", path)
    owner = block.group() if block else path.rpartition(".")[0]
    return None if input_name is None else f"{owner}:{input_name}"


# Placement of gradient sums, such that replicated tensors get the whole gradient, once.
#
# Walking the graph backward, a replicated tensor has on each rank its *whole* gradient, or only the *part* of this
# rank's heads. A column-parallel layer can sum its input's gradient; if a tensor is also used otherwise in a split
# region (keys that all heads share), the gradient is summed at the tensor's origin.

_WHOLE, _PART, _INPUT = "whole", "part", "input"


def find_sums(trace: Trace, labelled: LabelledGraph) -> GradientSums:
    """Find where to sum gradients. PlanError: a tensor is used inside and outside of split regions, and no sum can be
    inserted between.
    """
    later: set[str] = set()  # column layers whose input's gradient is summed further upstream
    while True:
        sums = GradientSums(trace, labelled, later)
        sums.run()
        if sums.later == later:
            return sums
        later = sums.later


class GradientSums:
    """Placement of gradient sums, found in one backward walk. Uses of a tensor: *whole*, *part*, or *input*: only by
    column layers, which may sum or not.

    ``inputs``: weight of a column layer -> name of its input, None if not summed there; ``outputs``: weights of layers
    whose output's gradient is summed; ``params``: parameters whose gradient is.
    """

    def __init__(self, trace: Trace, labelled: LabelledGraph, later: set[str]) -> None:
        self.trace = trace
        self.labelled = labelled
        self.later = set(later)
        self.inputs: dict[str, str | None] = {}
        self.outputs: list[str] = []
        self.params: list[str] = []
        self.uses: dict[Node, set[str]] = defaultdict(set)
        self.columns: dict[Node, set[str]] = defaultdict(set)

    def run(self) -> None:
        for node in reversed(list(self.trace.graph.nodes)):
            if node.op == "output":
                for each in node.all_input_nodes:
                    self.uses[each].add(_WHOLE)
            elif node.op == "placeholder":
                if self._status(node) == _PART and node.name in self.trace.params:
                    self.params.append(self.trace.params[node.name])
            elif node.op == "call_function":
                self._call(node)

    def _call(self, node: Node) -> None:
        linear = self.labelled.linears.get(node)
        if linear is not None and linear[0] == "column":
            self._column(node, linear[1])
            return
        if any(v.kind == SPLIT for v in values_in(self.labelled.values.get(node))):
            self._pass(node, _PART)
            return
        status = self._status(node)
        if status == _PART and (weight := weight_of(node, self.trace)) is not None:
            self.outputs.append(weight)
            status = _WHOLE
        if status is not None:
            self._pass(node, status)

    def _column(self, node: Node, weight: str) -> None:
        place = self.labelled.entries[node]
        if weight in self.later:
            self.inputs[weight] = None
            self.uses[place].add(_PART)
            return
        self.inputs.setdefault(weight, source(place).name)
        self.uses[place].add(_INPUT)
        self.columns[place].add(weight)

    def _status(self, node: Node) -> str | None:
        uses = self.uses[node]
        if _PART in uses and _WHOLE in uses:
            raise PlanError(f"{node.name} is used both by split layers and elsewhere")
        if _PART in uses:
            self.later |= self.columns[node]
            return _PART
        return _WHOLE if _WHOLE in uses else _INPUT if uses else None

    def _pass(self, node: Node, status: str) -> None:
        adopted = self.labelled.adopted.get(node, set())
        for each in node.all_input_nodes:
            value = self.labelled.values.get(each)
            if each in adopted or not any(v.kind in (PLAIN, FREE) and v.learned for v in values_in(value)):
                continue
            self.uses[each].add(status)
            if status == _INPUT:
                self.columns[each] |= self.columns[node]


# Of identical blocks of a model, one is traced, and its plan applies to the others.
#
# So planning time does not grow with the number of layers. Blocks are identical if they are members of one
# ``nn.ModuleList`` with equal classes, weight shapes and attributes. (Layer indices are ignored: nothing that depends
# on them concerns channels.)

_OWN_NUMBER = frozenset(("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx"))
_PLAIN = (int, float, str, bool, type(None))


RepeatedBlocks = Mapping[str, Sequence[str]]
"""Path of a traced block -> paths of identical blocks, which are not traced."""


def drop_repeated(module: nn.Module, kept: Container[str]) -> RepeatedBlocks:
    """Remove from ``module`` the blocks that others represent. ``kept``: names of parameters that stay whole; blocks
    that differ in them are not identical."""
    uses = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    others: dict[str, Sequence[str]] = {}
    done: list[str] = []
    for path, blocks in list(module.named_modules()):
        if not isinstance(blocks, nn.ModuleList) or any(
            not each or path.startswith(f"{each}.") for each in done
        ):
            continue
        done.append(path)
        alike: dict[Any, list[str]] = defaultdict(list)
        for key, block in blocks.named_children():
            place = f"{path}.{key}" if path else key
            shared = any(uses[id(p)] > 1 for p in block.parameters()) or not any(block.children())
            alike[place if shared else _signature(block, place, kept)].append(place)
        for first, *more in alike.values():
            if more:
                others[first] = more
                for each in more:
                    del blocks._modules[each.rpartition(".")[2]]
    return others


def _signature(block: nn.Module, place: str, kept: Container[str]) -> tuple[Any, ...]:
    parts: list[Any] = []
    for path, module in block.named_modules():
        numbers = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, _PLAIN) and name not in _OWN_NUMBER
        }
        parts.append((path, type(module), tuple(sorted(numbers.items()))))
    for name, param in block.named_parameters(remove_duplicate=False):
        parts.append((name, tuple(param.shape), param.dtype, f"{place}.{name}" in kept))
    return tuple(parts)


def expand_plan(plan: TensorParallelPlan, repeated: RepeatedBlocks) -> TensorParallelPlan:
    """Expand the plan of the shortened model to the whole one."""

    def counterparts(name: str) -> list[str]:
        for path, others in repeated.items():
            if name == path or name.startswith((f"{path}.", f"{path}:")):
                return [name, *(other + name[len(path) :] for other in others)]
        return [name]

    return plan.renamed(counterparts) if repeated else plan
