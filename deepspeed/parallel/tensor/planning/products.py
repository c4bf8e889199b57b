"""Label rules of elementwise operations and products: which labels they unite, create and end."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from deepspeed.parallel.tensor.planning.label_rules import LabelRules, Operands
from deepspeed.parallel.tensor.planning.labels import NONE, varies
from deepspeed.parallel.tensor.planning.values import (
    ALONG,
    FREE,
    KEEPS_SHAPE,
    PLAIN,
    SPLIT,
    Value,
    as_list,
    copies_along,
    is_several,
    plain_value,
    shape_of,
)

# Elementwise operations and reductions: labels that meet are united.


class Elementwise(LabelRules):
    """Rules of elementwise operations. Each takes a node, its name and operands, and returns the result's value."""

    def _pointwise(self, node: Node, name: str, operands: Operands) -> Any:
        shape = shape_of(node)
        if shape is None:
            return self._unknown(node, name, operands)
        return self._combined(node, shape, operands)

    def _combined(self, node: Node, shape: tuple[int, ...], operands: Sequence[tuple[Node, Value]]) -> Value:
        """Combine operands elementwise, with broadcasting."""
        learned = any(v.learned for _, v in operands)
        split = [v for _, v in operands if v.kind == SPLIT]
        if not split:
            return self._combined_whole(node, shape, operands, learned)
        base = split[0].ids.expand(shape)  # type: ignore[union-attr]
        for value in split[1:]:
            base = self.labels.joined(base, value.ids)  # type: ignore[arg-type]
        dims: set[int] = set()
        for place, value in operands:
            if value.kind == SPLIT:
                continue
            if value.kind == FREE and self._adopts(base, value):
                self.labels.unite(base, value.ids)  # type: ignore[arg-type]
                self.graph.adopted.setdefault(node, set()).add(place)
                continue
            self._use_whole(value, node)
            if value.argument is not None and any(varies(base, d) for d in value.dims() if -d <= base.ndim):
                self.graph.met.append((torch.unique(base), value.argument))
            dims.update(value.dims())
        if dims:
            base = self.labels.merged(base, sorted(dims)).expand(shape)
        return Value(shape, SPLIT, base, learned=True)

    def _combined_whole(
        self, node: Node, shape: tuple[int, ...], operands: Sequence[tuple[Node, Value]], learned: bool
    ) -> Value:
        free = [v for _, v in operands if v.kind == FREE]
        if free and len({v.param for v in free}) == 1:
            own = {d for v in free for d in v.dims()}
            other = {d for _, v in operands if v.kind == PLAIN for d in v.dims()}
            if not own & other and all(v.ids is not None for v in free):
                ids = free[0].ids.expand(shape)  # type: ignore[union-attr]
                if all(torch.equal(v.ids.expand(shape), ids) for v in free):  # type: ignore[union-attr]
                    return Value(shape, FREE, ids, free[0].param, (), True)
        for _, value in operands:
            self._use_whole(value, node)
        if all(v.kind == PLAIN for _, v in operands):
            return Value(
                shape, PLAIN, copies_along(shape, {d for _, v in operands for d in v.dims()}), learned=learned
            )
        return Value(shape, learned=learned)

    def _adopts(self, base: Tensor, value: Value) -> bool:
        """Return whether each element of ``value`` meets at most one label, and some do."""
        ids, base = torch.broadcast_tensors(value.ids, base)  # type: ignore[arg-type]
        if bool((base == NONE).any()):
            return False
        pairs = torch.unique(torch.stack([ids.flatten(), base.flatten()]), dim=1)
        return pairs.shape[1] == torch.unique(pairs[0]).numel()

    def _along(self, node: Node, name: str, operands: Operands) -> Any:
        value, shape = operands[0][1], shape_of(node)
        if is_several(node):
            shape = tuple(node.meta["val"][0].shape)
        self._use_whole(value, node)
        if value.kind != SPLIT:
            return plain_value(node, value.learned)
        if shape is None or len(operands) > 1:
            return self._unknown(node, name, operands)
        given: Any = node.kwargs.get("dim", node.args[ALONG[name]] if len(node.args) > ALONG[name] else None)
        dims = list(range(len(value.shape))) if given in (None, []) else as_list(given)
        merged = self.labels.merged(value.ids, dims)  # type: ignore[arg-type]
        if name in KEEPS_SHAPE:
            return Value(shape, SPLIT, merged.expand(shape), learned=True)
        made = Value(shape, SPLIT, merged.reshape(shape), learned=True)
        return [made, made] if is_several(node) else made

    def _norm(self, node: Node, name: str, operands: Operands) -> Any:
        value = operands[0][1]
        shape = value.shape
        if value.kind != SPLIT:
            for _, each in operands:
                self._use_whole(each, node)
            made = Value(shape, learned=True)
        else:
            count = len(node.args[1])  # type: ignore[arg-type]
            merged = self.labels.merged(value.ids, [-d for d in range(1, count + 1)]).expand(shape)  # type: ignore[arg-type]
            made = self._combined(
                node, shape, [(operands[0][0], Value(shape, SPLIT, merged, learned=True)), *operands[1:]]
            )
        return [made, Value(()), Value(())] if is_several(node) else made

    def _embedding(self, node: Node, name: str, operands: Operands) -> Any:
        weight = self.graph.values[cast("Node", node.args[0])]
        shape = shape_of(node)
        others = [v for _, v in operands if v is not weight]
        self._give_up(others, "it selects rows of an embedding")
        if weight.param is None or weight.axes != (0, 1) or shape is None:
            return plain_value(node, True)
        return Value(shape, FREE, self.axis(weight.param, 1, shape[-1]).expand(shape), weight.param, (), True)


# Products: linear layers create and end labels, and contracted dims are united.


class Products(Elementwise):
    """Rules of products. Each takes a node, its name and operands, and returns the result's value."""

    def _product(self, node: Node, name: str, operands: Operands) -> Any:
        values = self.graph.values
        args: list[Any] = list(node.args)
        bias = None
        if name in ("addmm", "baddbmm"):
            bias, args = args[0], args[1:]
        elif name == "linear":
            bias = args[2] if len(args) > 2 else node.kwargs.get("bias")
        left, right = values[args[0]], values[args[1]]
        if right.axes and len(right.shape) == 2:
            return self._linear(node, args[0], right, (0, 1) if name == "linear" else (1, 0), bias)
        if name == "linear":  # the weight stays whole
            if left.kind == SPLIT and right.kind == PLAIN:
                return self._shared(node, left, "", bias)
            return self._unknown(node, name, operands)
        shape = shape_of(node)
        made = self._contracted(node, left, right, shape)
        if bias is not None:
            made = self._combined(node, shape, [(node, made), (bias, values[bias])])  # type: ignore[arg-type]
        return made

    def _linear(self, node: Node, place: Node, weight: Value, dims: tuple[int, int], bias: Any) -> Value:
        """Handle the product of ``place`` with a labelled matrix. ``dims``: those of its outputs and of its inputs."""
        x, param = self.graph.values[place], weight.param
        assert param is not None
        (outward, outputs), (inward, inputs) = ((weight.axes[d], weight.shape[d]) for d in dims)
        shape = shape_of(node)
        assert shape is not None
        bias_value = self.graph.values[bias] if isinstance(bias, Node) else None
        bias_name = bias_value.param if bias_value is not None else None
        if x.kind != SPLIT:
            self._use_whole(x, node)
            if param in self.first_factor.values() or self.first_factor.get(param) in self.graph.rows:
                return plain_value(node, True)
            labels = self.axis(param, outward, outputs)
            if self.graph.columns.setdefault(param, outward) != outward or param in self.graph.rows:
                self.labels.forbid(labels, f"{param} is used in two ways")
            self.graph.linears[node] = ("column", param, bias_name)
            self.graph.entries[node] = place
            made = Value(shape, SPLIT, labels.expand(shape), learned=True)
            if bias_value is not None:
                made = self._combined(node, shape, [(node, made), (bias, bias_value)])
            return made
        assert x.ids is not None
        flat = x.ids.reshape(-1, x.ids.shape[-1])
        if not bool((flat == flat[0]).all()):
            return self._shared(node, x, param, bias)
        if bool((flat[0] == NONE).any()):
            self.labels.forbid(x.ids, f"the input of {param} is only partly split")
        labels = self.axis(param, inward, inputs)
        self.labels.unite(labels, flat[0])
        if self.graph.rows.setdefault(param, inward) != inward or param in self.graph.columns:
            self.labels.forbid(labels, f"{param} is used in two ways")
        self.graph.linears[node] = ("row", param, bias_name)
        if bias_value is not None:
            self._use_whole(bias_value, node)
        return Value(shape, learned=True)

    def _shared(self, node: Node, x: Value, param: str, bias: Any) -> Value:
        """Handle one matrix applied to each part separately, such as to every head."""
        shape = shape_of(node)
        assert shape is not None and x.ids is not None
        if param:
            self.graph.used_whole.setdefault(param, node.name)
        merged = self.labels.merged(x.ids, [-1]).expand(shape)
        if isinstance(bias, Node):
            self._use_whole(self.graph.values[bias], node)
        return Value(shape, SPLIT, merged, learned=True)

    def _contracted(self, node: Node, left: Value, right: Value, shape: tuple[int, ...] | None) -> Value:
        for each in (left, right):
            self._use_whole(each, node)
        if SPLIT not in (left.kind, right.kind) or shape is None:
            return Value(shape or (), learned=left.learned or right.learned)
        if len(left.shape) < 2 or len(right.shape) < 2:
            self._give_up([left, right], "a product with a vector")
            return Value(shape, learned=True)
        parts = []
        for value, other in ((left, right), (right, left)):
            self._note_copies(value, other)
        for value, other, dim in ((left, right, -1), (right, left, -2)):
            if value.kind != SPLIT:
                continue
            dims = [dim]
            if other.kind != SPLIT:
                dims += [d for d in other.dims() if d < -2 and -d <= len(value.shape)]
            parts.append(self.labels.merged(value.ids, dims).expand([  # type: ignore[arg-type]
                1 if d == len(value.shape) + dim else size for d, size in enumerate(value.shape)
            ]))  # fmt: skip
        made = parts[0] if len(parts) == 1 else self.labels.joined(parts[0], parts[1])
        if made.ndim < len(shape) or prod(made.shape) != prod(shape):
            made = made.expand(shape)
        return Value(shape, SPLIT, made, learned=True)

    def _note_copies(self, value: Value, other: Value) -> None:
        """Record operands that a product broadcasts over the other side (one key head for all queries)."""
        if value.kind != SPLIT or other.kind != SPLIT or value.ids is None or other.ids is None:
            return
        sizes = (*(1,) * (len(other.shape) - len(value.shape)), *value.shape)
        batch = range(-len(other.shape), -2)
        if any(sizes[d] == 1 < other.shape[d] and varies(other.ids, d) for d in batch):
            self.graph.copied.append((self.labels.united, torch.unique(value.ids)))

    def _attention(self, node: Node, name: str, operands: Operands) -> Any:
        values = [self.graph.values[arg] if isinstance(arg, Node) else None for arg in node.args[:4]]
        query, key, value = values[:3]
        shape = shape_of(node)
        if (
            query is None
            or key is None
            or value is None
            or shape is None
            or not any(v.kind == SPLIT for _, v in operands)
        ):
            return self._unknown(node, name, operands)
        if query.shape[-3] != key.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = (self._repeated(each, times) for each in (key, value))
        turned = None if key.ids is None else key.ids.transpose(-1, -2)
        key = Value((*key.shape[:-2], key.shape[-1], key.shape[-2]), key.kind, turned, learned=key.learned)
        scores_shape = (*shape[:-1], key.shape[-1])
        scores = self._contracted(node, query, key, scores_shape)
        mask = values[3] if len(values) > 3 else None
        if mask is not None and scores.kind == SPLIT:
            scores = self._combined(node, scores_shape, [(node, scores), (node.args[3], mask)])  # type: ignore[list-item]
        if scores.kind == SPLIT:
            merged = self.labels.merged(scores.ids, [-1]).expand(scores_shape)  # type: ignore[arg-type]
            scores = Value(scores_shape, SPLIT, merged, learned=True)
        return self._contracted(node, scores, value, shape)

    def _repeated(self, value: Value, times: int) -> Value:
        ids = value.own_ids()
        if value.kind == SPLIT:
            self.graph.copied.append((self.labels.united, torch.unique(ids)))
        ids = ids.repeat_interleave(times, -3)
        return Value(tuple(ids.shape), value.kind, ids, value.param, (), value.learned)
