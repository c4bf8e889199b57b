"""Follows labels of channels through the graph of a model: which weights can be split with which, and into what parts.

Every linear layer whose input all ranks have may give each of its output channels a label. What an operation computes
from several labels unites them; where labelled channels enter a further linear layer along its input, the products of
the ranks can be summed, and the labels end. An operation that is not known gives up everything that it gets, so that
nothing is ever split that has not been shown to be separable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.fx import Node

from deepspeed.parallel.tensor.planning.moves import Moves
from deepspeed.parallel.tensor.planning.products import Products
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.tracker import Operands
from deepspeed.parallel.tensor.planning.values import (
    ALONG,
    FREE,
    IDENTITY,
    MOVES,
    PLAIN,
    POINTWISE,
    UNIFORM,
    Followed,
    Soft,
    Value,
    is_several,
    operation_name,
    plain_value,
    shape_of,
)


def follow(
    trace: Trace, whole: Iterable[str], soft: Soft | None = None, arguments: Iterable[str] = ()
) -> Followed:
    """Labels of all tensors of the graph, if the parameters in ``whole`` are not split. ``soft``: which channels of
    which dim of a parameter several ranks may have (bool [size]). ``arguments``: those of modules that may be cut."""
    return _Follower(trace, frozenset(whole), soft or {}, frozenset(arguments)).run()


class _Follower(Moves, Products):
    def run(self) -> Followed:
        values = self.found.values
        for node in self.trace.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._placeholder(node)
            elif node.op == "call_function":
                values[node] = self._call(node)
            elif node.op == "output":
                for each in node.all_input_nodes:
                    self._give_up(values[each], "it is a result of the model")
            else:
                values[node] = plain_value(node)
        return self.found

    def _placeholder(self, node: Node) -> Value:
        shape = shape_of(node)
        param = self.trace.params.get(node.name)
        if param is None or shape is None:
            return Value(shape or ())
        long = [dim for dim, size in enumerate(shape) if size > 1]
        if param in self.whole or len(long) > 2 or not long:
            return Value(shape, learned=True)
        if len(long) == 1:
            labels = self.axis(param, long[0], shape[long[0]])
            return Value(shape, FREE, labels.view(shape), param, learned=True)
        if len(shape) == 2:
            return Value(shape, PLAIN, None, param, (0, 1), learned=True)
        return Value(shape, learned=True)

    def _call(self, node: Node) -> Any:
        name = operation_name(node)
        if name == "getitem":
            several, number = cast("tuple[Node, int]", node.args)
            value = self.found.values[several]
            return value[number] if isinstance(value, (list, tuple)) else plain_value(node)
        if name.startswith(("_assert", "sym_", "_check")):
            return Value(())
        operands = self._operands(node)
        if name in UNIFORM:
            shape = shape_of(node) or ()
            return Value(shape, PLAIN, torch.ones(shape, dtype=torch.int64))
        if not operands or shape_of(node) is None and not is_several(node):
            self._give_up([v for _, v in operands], f"{name} computes something else than a tensor")
            return plain_value(node, any(v.learned for _, v in operands))
        rule = self._rule(node, name)
        return rule(node, name, operands)

    def _rule(self, node: Node, name: str) -> Callable[[Node, str, Operands], Any]:
        if node.name in self.trace.arguments:
            return self._argument
        if name in ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm"):
            return self._product
        if name == "embedding":
            return self._embedding
        if name in IDENTITY:
            return self._identity
        if name in MOVES:
            return self._move
        if name in ("cat", "concat", "stack"):
            return self._join_parts
        if name == "slice_scatter":
            return self._written
        if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
            return self._norm
        if name in ALONG:
            return self._along
        if name == "scaled_dot_product_attention":
            return self._attention
        if name == "constant_pad_nd":
            return self._pad
        if name == "index":
            return self._indexed
        tags = getattr(node.target, "tags", ())
        if name in POINTWISE or torch.Tag.pointwise in tags:
            return self._pointwise
        return self._unknown
