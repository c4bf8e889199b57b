"""Places where gradients are summed, so that tensors held by all ranks get the whole gradient, once.

Going backward through the graph: a tensor that all ranks have has its *whole* gradient on each of them, or only the
*part* of this rank's heads. A column-parallel layer can sum that of its input; where a tensor is used in a split region
in other ways too (keys that all heads share), it is summed where the tensor comes from.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch.fx import Node

from deepspeed.parallel.tensor.planning.plan import PlanError
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import FREE, PLAIN, SPLIT, Followed, Value, source

_WHOLE, _PART, _INPUT = "whole", "part", "input"


@dataclass(slots=True)
class Sums:
    """``inputs``: weight of a column layer -> a name of its input, None if it is not to sum; ``outputs``: weights of
    layers whose output's gradient is summed; ``params``: those whose own gradient is."""

    inputs: dict[str, str | None] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)


def find_sums(trace: Trace, followed: Followed) -> Sums:
    """Find the places for sums. PlanError: a tensor is used inside and outside of split regions, and nothing can be put
    between.
    """
    later: set[str] = set()  # column layers whose input is summed further back
    while True:
        run = _Backward(trace, followed, later)
        run.run()
        if run.later == later:
            return run.sums
        later = run.later


class _Backward:
    """One pass. A tensor's uses: *whole*, *part*, or *input*: only by column layers, which may sum or leave it."""

    def __init__(self, trace: Trace, followed: Followed, later: set[str]) -> None:
        self.trace = trace
        self.followed = followed
        self.later = set(later)
        self.sums = Sums()
        self.uses: dict[Node, set[str]] = defaultdict(set)
        self.columns: dict[Node, set[str]] = defaultdict(set)

    def run(self) -> None:
        for node in reversed(list(self.trace.graph.nodes)):
            if node.op == "output":
                for each in node.all_input_nodes:
                    self.uses[each].add(_WHOLE)
            elif node.op == "placeholder":
                if self._status(node) == _PART and node.name in self.trace.params:
                    self.sums.params.append(self.trace.params[node.name])
            elif node.op == "call_function":
                self._call(node)

    def _call(self, node: Node) -> None:
        linear = self.followed.linears.get(node)
        if linear is not None and linear[0] == "column":
            self._column(node, linear[1])
            return
        if _kind(self.followed.values.get(node)) == SPLIT:
            self._pass(node, _PART)
            return
        status = self._status(node)
        if status == _PART and (weight := _weight_of(node, self.trace)) is not None:
            self.sums.outputs.append(weight)
            status = _WHOLE
        if status is not None:
            self._pass(node, status)

    def _column(self, node: Node, weight: str) -> None:
        place = self.followed.entries[node]
        if weight in self.later:
            self.sums.inputs[weight] = None
            self.uses[place].add(_PART)
            return
        self.sums.inputs.setdefault(weight, source(place).name)
        self.uses[place].add(_INPUT)
        self.columns[place].add(weight)

    def _status(self, node: Node) -> str | None:
        uses = self.uses[node]
        if _PART in uses and _WHOLE in uses:
            raise PlanError(f"{node.name} is used by split layers and besides them")
        if _PART in uses:
            self.later |= self.columns[node]
            return _PART
        return _WHOLE if _WHOLE in uses else _INPUT if uses else None

    def _pass(self, node: Node, status: str) -> None:
        adopted = self.followed.adopted.get(node, set())
        for each in node.all_input_nodes:
            value = self.followed.values.get(each)
            if each in adopted or not any(v.kind in (PLAIN, FREE) and v.learned for v in _values(value)):
                continue
            self.uses[each].add(status)
            if status == _INPUT:
                self.columns[each] |= self.columns[node]


def _weight_of(node: Node, trace: Trace) -> str | None:
    """The weight, if this is a linear layer."""
    target = str(node.target)
    if not any(name in target for name in ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")):
        return None
    for each in node.all_input_nodes:
        place = each
        while place.op == "call_function" and len(place.all_input_nodes) == 1:
            place = place.all_input_nodes[0]
        name = trace.params.get(place.name)
        if name is not None and len(place.meta["val"].shape) == 2:
            return name
    return None


def _values(value: object) -> list[Value]:
    return [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Value)]


def _kind(value: object) -> str:
    return SPLIT if any(v.kind == SPLIT for v in _values(value)) else PLAIN
