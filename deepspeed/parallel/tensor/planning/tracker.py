"""Common part of the rules of all families of operations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from deepspeed.parallel.tensor.planning.factors import factors
from deepspeed.parallel.tensor.planning.labels import Labels
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import SPLIT, Followed, Soft, Value, flat, plain_value

Operands = list[tuple[Node, Value]]
"""What an operation gets: the nodes, and what is known of each of their tensors."""


class Tracker:
    """One pass through a graph: the labels, and what has been found."""

    def __init__(self, trace: Trace, whole: frozenset[str], soft: Soft, arguments: frozenset[str]) -> None:
        self.arguments = arguments
        self.trace = trace
        self.soft = soft
        self.whole = whole
        self.second = factors(trace)
        self.labels = Labels()
        self.found = Followed(self.labels)

    def axis(self, param: str, dim: int, size: int) -> Tensor:
        key = (param, dim)
        if key not in self.found.axis_labels:
            self.found.axis_labels[key] = self.labels.fresh(size, soft=self.soft.get(key))
        return self.found.axis_labels[key]

    def _give_up(self, value: Any, reason: str) -> None:
        for each in flat(value):
            if each.kind == SPLIT and each.ids is not None:
                self.labels.stick(each.ids, reason)

    def _operands(self, node: Node) -> list[tuple[Node, Value]]:
        found: list[tuple[Node, Value]] = []
        for each in node.all_input_nodes:
            value = self.found.values[each]
            found += [(each, v) for v in flat(value)]
        return found

    def _unknown(self, node: Node, name: str, operands: Operands) -> Any:
        for _, value in operands:
            self._use_whole(value, node)
        self._give_up([v for _, v in operands], f"{name} is not known to work on parts")
        return plain_value(node, any(v.learned for _, v in operands))

    def _use_whole(self, value: Value, node: Node) -> None:
        if value.param is not None and value.kind != SPLIT:
            self.found.whole_uses.setdefault(value.param, node.name)
