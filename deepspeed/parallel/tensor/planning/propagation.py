"""Follows channel labels through the graph of a model, to find which weights can be split together, into which parts.

A linear layer whose input is on all ranks may give each of its output channels a label. An operation that computes one
element from several labels unites them. Where labelled channels enter another linear layer along its input dim, the
ranks' products can be summed, and the labels end. An unknown operation gives up all of its inputs, so that only what
has been shown to be separable is ever split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from deepspeed.parallel.tensor.planning.label_rules import LabelRules, Operands
from deepspeed.parallel.tensor.planning.labels import varies
from deepspeed.parallel.tensor.planning.products import Products
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import (
    ALONG,
    COPIES,
    FREE,
    IDENTITY,
    MAX_NUMEL,
    MOVES,
    PLAIN,
    SPLIT,
    UNIFORM,
    LabelledGraph,
    SharableChannels,
    Value,
    is_pointwise,
    is_several,
    moved_axes,
    operation_name,
    plain_value,
    shape_of,
)

# Operations that move data, and the labels with it.


class Moves(LabelRules):
    """Rules for operations that move data. Each takes a node, its name and its operands, and returns the ``Value`` of
    the result, or a list of them."""

    def _identity(self, node: Node, name: str, operands: Operands) -> Any:
        value = operands[0][1]
        return [value] * 2 if is_several(node) else value

    def _argument(self, node: Node, name: str, operands: Operands) -> Any:
        value, key = operands[0][1], self.trace.arguments[node.name]
        if value.kind != PLAIN or value.learned or value.param is not None:
            return value
        if key not in self.arguments or not prod(value.shape):
            return replace(value, argument=key)
        if self.graph.arguments.setdefault(key, value.shape) != value.shape:
            return value
        return Value(value.shape, FREE, self.axis(key, 0, prod(value.shape)).view(value.shape), key)

    def _move(self, node: Node, name: str, operands: Operands) -> Any:
        value = operands[0][1]
        if value.axes:
            if name in ("t", "numpy_T", "transpose", "permute"):
                flipped = [value.axes[i] for i in moved_axes(node, name)]
                return Value(tuple(shape_of(node) or ()), PLAIN, None, value.param, tuple(flipped), True)
            self._use_whole(value, node)
            value = Value(value.shape, learned=True)
        ids = value.ids
        if ids is None:
            if name not in COPIES:
                made = plain_value(node, value.learned)
                return replace(made, argument=value.argument) if isinstance(made, Value) else made
            if value.shape and prod(value.shape) > MAX_NUMEL:
                return plain_value(node, value.learned)
            ids = value.own_ids()
        args = [ids if arg is node.args[0] else arg for arg in node.args]
        kwargs = {
            k: v for k, v in node.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory")
        }
        if any(isinstance(arg, Node) for arg in tree_leaves([args, kwargs])):
            return self._unknown(node, name, operands)
        if name in ("view", "_unsafe_view"):
            moved: Any = ids.reshape(list(cast("Sequence[int]", args[1])))
        else:
            moved = node.target(*args, **kwargs)  # type: ignore[operator]
        if value.kind == SPLIT and name in COPIES and moved.numel() > ids.numel():
            self.graph.copied.append((self.labels.united, torch.unique(ids)))

        def make(each: Tensor) -> Value:
            return Value(tuple(each.shape), value.kind, each, value.param, (), value.learned, value.argument)

        return [make(each) for each in moved] if isinstance(moved, (list, tuple)) else make(moved)

    def _indexed(self, node: Node, name: str, operands: Operands) -> Any:
        """Follow an index operation whose indices are constants in the model's code."""
        value, indices = operands[0][1], list(cast("Sequence[Any]", node.args[1]))
        constants = [
            self.trace.constants.get(each.name) if isinstance(each, Node) else each for each in indices
        ]
        unknown = any(c is None and i is not None for c, i in zip(constants, indices, strict=True))
        if value.kind != SPLIT or value.ids is None or unknown:
            return self._unknown(node, name, operands)
        places = tuple(slice(None) if each is None else torch.as_tensor(each) for each in constants)
        moved = value.ids[places]
        return Value(tuple(moved.shape), SPLIT, moved, learned=True)

    def _pad(self, node: Node, name: str, operands: Operands) -> Any:
        value = operands[0][1]
        if value.kind != SPLIT:
            self._use_whole(value, node)
            return plain_value(node, value.learned)
        padding: Any = node.args[1]
        last = value.ids
        assert last is not None
        for number in range(len(padding) // 2):
            if (padding[2 * number] or padding[2 * number + 1]) and varies(last, last.ndim - 1 - number):
                return self._unknown(node, name, operands)
        moved = torch.nn.functional.pad(last, list(padding))
        return Value(tuple(moved.shape), SPLIT, moved, learned=True)

    def _join_parts(self, node: Node, name: str, operands: Operands) -> Any:
        parts: Any = node.args[0]
        dim = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))  # type: ignore[arg-type]
        values: list[Value] = [self.graph.values[each] for each in parts]
        learned = any(v.learned for v in values)
        if not any(v.kind == SPLIT for v in values):
            for value in values:
                self._use_whole(value, node)
            shape = shape_of(node)
            if name != "stack" and any(v.ids is not None and v.kind == PLAIN for v in values):
                made = [(v if v.kind == PLAIN else Value(v.shape)).own_ids() for v in values]
                return Value(shape or (), PLAIN, torch.cat(made, dim), learned=learned)
            return plain_value(node, learned)
        width = len(values[0].shape)
        across = dim % width if name != "stack" else None
        shared = {d for v in values if v.kind == PLAIN for d in v.dims() if d % width != across}
        ids: list[Tensor] = []
        for place, value in zip(parts, values, strict=True):
            if value.kind == PLAIN:
                ids.append(torch.zeros(value.shape, dtype=torch.int64))
                continue
            if value.kind == FREE:
                self.graph.adopted.setdefault(node, set()).add(place)
            assert value.ids is not None
            ids.append(self.labels.merged(value.ids, sorted(shared)).expand(value.shape))
        joined = torch.stack(ids, dim) if name == "stack" else torch.cat(ids, dim)
        return Value(tuple(joined.shape), SPLIT, joined, learned=True)

    def _written(self, node: Node, name: str, operands: Operands) -> Any:
        """Follow the replacement of a part of the first tensor by the second."""
        base, part = operands[0][1], operands[-1][1]
        if SPLIT not in (base.kind, part.kind):
            return self._unknown(node, name, operands)
        ids = []
        for value, against in ((base, part), (part, base)):
            if value.kind != SPLIT:
                self._use_whole(value, node)
                ids.append(torch.zeros(value.shape, dtype=torch.int64))
                continue
            dims = [] if against.kind == SPLIT else against.dims()
            ids.append(self.labels.merged(value.ids, sorted(dims)).expand(value.shape))  # type: ignore[arg-type]
        made = torch.slice_scatter(ids[0], ids[1], *node.args[2:], **node.kwargs)  # type: ignore[arg-type]
        return Value(base.shape, SPLIT, made, learned=True)


def propagate_labels(
    trace: Trace,
    whole: Iterable[str],
    sharable: SharableChannels | None = None,
    arguments: Iterable[str] = (),
) -> LabelledGraph:
    """Label all tensors of the graph, with the parameters in ``whole`` not split. ``sharable``: by dim of a parameter,
    the channels that several ranks may hold (bool [size]). ``arguments``: the arguments of modules that may be cut."""
    return _Propagation(trace, frozenset(whole), sharable or {}, frozenset(arguments)).run()


class _Propagation(Moves, Products):
    def run(self) -> LabelledGraph:
        values = self.graph.values
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
        return self.graph

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
            value = self.graph.values[several]
            return value[number] if isinstance(value, (list, tuple)) else plain_value(node)
        if name.startswith(("_assert", "sym_", "_check")):
            return Value(())
        operands = self._operands(node)
        if name in UNIFORM:
            shape = shape_of(node) or ()
            return Value(shape, PLAIN, torch.ones(shape, dtype=torch.int64))
        if not operands or shape_of(node) is None and not is_several(node):
            self._give_up([v for _, v in operands], f"{name} does not return a tensor")
            return plain_value(node, any(v.learned for _, v in operands))
        return self._rule(node, name)(self, node, name, operands)

    def _rule(self, node: Node, name: str) -> Callable[[_Propagation, Node, str, Operands], Any]:
        if node.name in self.trace.arguments:
            return _Propagation._argument
        return RULES.get(name, _Propagation._pointwise if is_pointwise(node) else _Propagation._unknown)


RULES: dict[str, Callable[[_Propagation, Node, str, Operands], Any]] = {
    **dict.fromkeys(ALONG, _Propagation._along),
    **dict.fromkeys(MOVES, _Propagation._move),
    **dict.fromkeys(IDENTITY, _Propagation._identity),
    **dict.fromkeys(("cat", "concat", "stack"), _Propagation._join_parts),
    **dict.fromkeys(("linear", "addmm", "mm", "matmul", "bmm", "baddbmm"), _Propagation._product),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _Propagation._norm),
    "embedding": _Propagation._embedding,
    "slice_scatter": _Propagation._written,
    "scaled_dot_product_attention": _Propagation._attention,
    "constant_pad_nd": _Propagation._pad,
    "index": _Propagation._indexed,
}
"""Rules by the name of the operation. Of others, pointwise ones have a common rule, and the rest is unknown."""
