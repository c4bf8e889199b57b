"""Operations on elements at one place, or on all along some dims: labels that meet are united."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from deepspeed.parallel.tensor.planning.labels import NONE, varies
from deepspeed.parallel.tensor.planning.tracker import Operands, Tracker
from deepspeed.parallel.tensor.planning.values import (
    ALONG,
    FREE,
    KEEPS_SHAPE,
    PLAIN,
    SPLIT,
    Value,
    copies_along,
    is_several,
    plain_value,
    shape_of,
)


class Elementwise(Tracker):
    """Each rule takes a node, its name and its operands, and says what is known of the result."""

    def _pointwise(self, node: Node, name: str, operands: Operands) -> Any:
        shape = shape_of(node)
        if shape is None:
            return self._unknown(node, name, operands)
        return self._combined(node, shape, operands)

    def _combined(self, node: Node, shape: tuple[int, ...], operands: Sequence[tuple[Node, Value]]) -> Value:
        """Elementwise, with broadcasting."""
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
                self.found.adopted.setdefault(node, set()).add(place)
                continue
            self._use_whole(value, node)
            if value.argument is not None and any(varies(base, d) for d in value.dims() if -d <= base.ndim):
                self.found.met.append((torch.unique(base), value.argument))
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
        if value.kind != SPLIT or shape is None or len(operands) > 1:
            return (
                self._unknown(node, name, operands)
                if value.kind == SPLIT
                else plain_value(node, value.learned)
            )
        given: Any = node.kwargs.get("dim", node.args[ALONG[name]] if len(node.args) > ALONG[name] else None)
        dims = (
            list(range(len(value.shape)))
            if given is None or given == []
            else [given]
            if isinstance(given, int)
            else list(given)
        )
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
        weight = self.found.values[cast("Node", node.args[0])]
        shape = shape_of(node)
        others = [v for _, v in operands if v is not weight]
        self._give_up(others, "it selects rows of an embedding")
        if weight.param is None or weight.axes != (0, 1) or shape is None:
            return plain_value(node, True)
        return Value(shape, FREE, self.axis(weight.param, 1, shape[-1]).expand(shape), weight.param, (), True)
