"""Base of the label rules of all families of operations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from deepspeed.parallel.tensor.planning.labels import Labels
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import (
    SPLIT,
    LabelledGraph,
    SharableChannels,
    Value,
    as_list,
    operation_name,
    plain_value,
)

Operands = list[tuple[Node, Value]]
"""Operands of an operation: nodes, with a value for each of their tensors."""


class LabelRules:
    """State of one pass through a graph: labels and results."""

    def __init__(
        self, trace: Trace, whole: frozenset[str], sharable: SharableChannels, arguments: frozenset[str]
    ) -> None:
        self.arguments = arguments
        self.trace = trace
        self.sharable = sharable
        self.whole = whole
        self.first_factor = factors(trace)
        self.labels = Labels()
        self.graph = LabelledGraph(self.labels)

    def axis(self, param: str, dim: int, size: int) -> Tensor:
        key = (param, dim)
        if key not in self.graph.axis_labels:
            self.graph.axis_labels[key] = self.labels.fresh(size, sharable=self.sharable.get(key))
        return self.graph.axis_labels[key]

    def _give_up(self, value: Any, reason: str) -> None:
        for each in as_list(value):
            if each.kind == SPLIT and each.ids is not None:
                self.labels.forbid(each.ids, reason)

    def _operands(self, node: Node) -> list[tuple[Node, Value]]:
        return [(each, v) for each in node.all_input_nodes for v in as_list(self.graph.values[each])]

    def _unknown(self, node: Node, name: str, operands: Operands) -> Any:
        for _, value in operands:
            self._use_whole(value, node)
        self._give_up([v for _, v in operands], f"{name} is not known to work on shards")
        return plain_value(node, any(v.learned for _, v in operands))

    def _use_whole(self, value: Value, node: Node) -> None:
        if value.param is not None and value.kind != SPLIT:
            self.graph.used_whole.setdefault(value.param, node.name)


# Factored matrices, such as low-rank adapters (E. Hu et al.: LoRA, 2021).


_PASSES = frozenset(
    "to clone contiguous detach alias dropout native_dropout _to_copy type_as view reshape".split()
)
_PRODUCTS = frozenset("linear addmm mm matmul".split())


def factors(trace: Trace) -> dict[str, str]:
    """Map second factors to first ones: weights of two consecutive linear layers with a bottleneck between them,
    narrower than the first one's input and the second one's output.

    Splitting the bottleneck gains nothing: it would need a sum inside a split region, and the layer in parallel to it
    could not be split. So next to a column-parallel layer the first factor stays whole and the second is split like
    that layer; next to a row-parallel one the first is split and the second stays whole.
    """
    found: dict[str, str] = {}
    for node in trace.graph.nodes:
        weight = weight_of(node, trace)
        if weight is None:
            continue
        middle = node.meta["val"].shape[-1]
        into = node.all_input_nodes[0].meta["val"].shape[-1]
        for end in _ends(node):
            second = weight_of(end, trace)
            if second is not None and middle < min(into, end.meta["val"].shape[-1]):
                found[second] = weight
    return found


def _ends(node: Node) -> list[Node]:
    """Return the consumers of ``node``'s values, looking through nodes that do not change them or scale them
    uniformly.
    """
    ends: list[Node] = []
    left = list(node.users)
    while left:
        user = left.pop()
        name = operation_name(user)
        if name in _PASSES or name in ("mul", "div", "getitem") and len(user.all_input_nodes) == 1:
            left += user.users
        else:
            ends.append(user)
    return ends


def weight_of(node: Node, trace: Trace) -> str | None:
    """Return the name of the weight if the node is a linear layer, looking through operations on the weight alone, else
    None."""
    if node.op != "call_function" or operation_name(node) not in _PRODUCTS:
        return None
    for each in node.all_input_nodes[1:]:
        place = each
        while place.op == "call_function" and len(place.all_input_nodes) == 1:
            place = place.all_input_nodes[0]
        name = trace.params.get(place.name)
        if name is not None and len(place.meta["val"].shape) == 2:
            return name
    return None
