"""Follows labels of channels through the graph of a model: which weights can be split with which, and into what parts.

Every linear layer whose input all ranks have may give each of its output channels a label. What an operation computes
from several labels unites them; where labelled channels enter a further linear layer along its input, the products of
the ranks can be summed, and the labels end. An operation that is not known gives up everything that it gets, so that
nothing is ever split that has not been shown to be separable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from deepspeed.runtime.tensor_parallel.planning.factors import factors
from deepspeed.runtime.tensor_parallel.planning.labels import NONE, Labels, varies
from deepspeed.runtime.tensor_parallel.planning.trace import Trace

Soft = Mapping[tuple[str, int], Tensor]
PLAIN, FREE, SPLIT = "plain", "free", "split"
_MOST = 1 << 22
"""Elements of larger tensors are not told apart."""


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor of the graph.

    PLAIN: every rank has it; ``ids``, if any, tell which elements are copies of each other. FREE: elements of one
    parameter (``ids`` are labels of its own), which may be cut if their users ask for it. SPLIT: ``ids`` are labels.
    ``param`` and ``axes``: a matrix as it was given, possibly transposed. ``learned``: some weight has a part in it.
    """

    shape: tuple[int, ...]
    kind: str = PLAIN
    ids: Tensor | None = None
    param: str | None = None
    axes: tuple[int, ...] = ()
    learned: bool = False
    argument: str | None = None
    """Of a module: where it comes from, moved about at most."""

    def dims(self) -> list[int]:
        """Those along which elements differ, counted from the end (-1, -2, ...)."""
        count = len(self.shape)
        if self.ids is not None:
            return [d - count for d in range(count) if varies(self.ids, d)]
        return [d - count for d in range(count) if self.shape[d] > 1]


@dataclass(slots=True)
class Followed:
    """``axis_labels``: labels of a parameter along one dim. ``columns``, ``rows``: parameters of linear layers that
    produce labels, or end them, with the nodes that do; ``whole_uses``: parameters used whole, by node name."""

    labels: Labels
    axis_labels: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, Node] = field(default_factory=dict)
    """Of each column layer."""
    values: dict[Node, Any] = field(default_factory=dict)
    entries: dict[Node, Node] = field(default_factory=dict)
    """Node of a column layer -> that of its input."""
    linears: dict[Node, tuple[str, str, str | None]] = field(default_factory=dict)
    """Linear node -> (what it is: column, row or shared; its weight; its bias)."""
    adopted: dict[Node, set[Node]] = field(default_factory=dict)
    """Node -> operands that are cut with the labels that they meet."""
    whole_uses: dict[str, str] = field(default_factory=dict)
    met: list[tuple[Tensor, str]] = field(default_factory=list)
    """Labels that were united because each met its own part of an argument."""
    arguments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Arguments that may be cut -> their shape; their labels are those of all elements, as axis 0."""
    copied: list[tuple[int, Tensor]] = field(default_factory=list)
    """Labels of which one operation made copies, and how much had been united before: heads that others share."""


_IDENTITY = frozenset(
    "to clone contiguous detach alias dropout native_dropout _to_copy type_as lift_fresh_copy lift_fresh float "
    "alias_copy detach_ dropout_ feature_dropout".split()
)
_MOVES = frozenset(
    "view reshape _unsafe_view transpose permute t unsqueeze squeeze expand slice select split split_with_sizes chunk "
    "unbind flatten unflatten movedim repeat repeat_interleave narrow flip expand_as swapaxes numpy_T roll "
    "tensor_split unsafe_chunk unsafe_split view_as reshape_as broadcast_to".split()
)
_COPIES = frozenset("expand repeat repeat_interleave expand_as broadcast_to".split())
_POINTWISE = frozenset(
    "masked_fill masked_fill_ where clamp_min add_ mul_ sub_ div_ gelu gelu_ silu silu_ relu relu_ tanh_ sigmoid_ "
    "leaky_relu hardtanh softplus threshold pow maximum minimum glu_ add sub mul div rsub softcap clamp copy_ copy "
    "elu elu_ selu mish hardswish hardsigmoid log_sigmoid logical_and logical_or bitwise_and".split()
)
_ALONG = {"softmax": 1, "_softmax": 1, "log_softmax": 1, "_log_softmax": 1, "sum": 1, "mean": 1, "amax": 1, "amin": 1,
          "var": 1, "max": 1, "min": 1, "std": 1, "logsumexp": 1, "cumsum": 1, "norm": 2,
          "linalg_vector_norm": 2, "any": 1, "all": 1}  # fmt: skip
_UNIFORM = frozenset(
    "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor empty empty_like "
    "new_empty empty_strided new_empty_strided".split()
)
_KEEPS_SHAPE = frozenset("softmax _softmax log_softmax _log_softmax cumsum".split())


def follow(
    trace: Trace, whole: Iterable[str], soft: Soft | None = None, arguments: Iterable[str] = ()
) -> Followed:
    """Labels of all tensors of the graph, if the parameters in ``whole`` are not split. ``soft``: which channels of
    which dim of a parameter several ranks may have (bool [size]). ``arguments``: those of modules that may be cut."""
    return _Follower(trace, frozenset(whole), soft or {}, frozenset(arguments)).run()


class _Follower:
    def __init__(self, trace: Trace, whole: frozenset[str], soft: Soft, arguments: frozenset[str]) -> None:
        self.arguments = arguments
        self.trace = trace
        self.soft = soft
        self.whole = whole
        self.second = factors(trace)
        self.labels = Labels()
        self.found = Followed(self.labels)

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
                values[node] = _plain(node)
        return self.found

    # ------------------------------------------------------------------------------------ values

    def axis(self, param: str, dim: int, size: int) -> Tensor:
        key = (param, dim)
        if key not in self.found.axis_labels:
            self.found.axis_labels[key] = self.labels.fresh(size, soft=self.soft.get(key))
        return self.found.axis_labels[key]

    def _placeholder(self, node: Node) -> Value:
        shape = _shape(node)
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

    def _give_up(self, value: Any, reason: str) -> None:
        for each in _flat(value):
            if each.kind == SPLIT and each.ids is not None:
                self.labels.stick(each.ids, reason)

    # ------------------------------------------------------------------------------------ operations

    def _call(self, node: Node) -> Any:
        name = operation_name(node)
        if name == "getitem":
            several, number = cast("tuple[Node, int]", node.args)
            value = self.found.values[several]
            return value[number] if isinstance(value, (list, tuple)) else _plain(node)
        if name.startswith(("_assert", "sym_", "_check")):
            return Value(())
        operands = self._operands(node)
        if name in _UNIFORM:
            shape = _shape(node) or ()
            return Value(shape, PLAIN, torch.ones(shape, dtype=torch.int64))
        if not operands or _shape(node) is None and not _is_several(node):
            self._give_up([v for _, v in operands], f"{name} computes something else than a tensor")
            return _plain(node, any(v.learned for _, v in operands))
        rule = self._rule(node, name)
        return rule(node, name, operands)

    def _rule(self, node: Node, name: str) -> Callable[[Node, str, list[tuple[Node, Value]]], Any]:
        if node.name in self.trace.arguments:
            return self._argument
        if name in ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm"):
            return self._product
        if name == "embedding":
            return self._embedding
        if name in _IDENTITY:
            return self._identity
        if name in _MOVES:
            return self._move
        if name in ("cat", "concat", "stack"):
            return self._join_parts
        if name == "slice_scatter":
            return self._written
        if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
            return self._norm
        if name in _ALONG:
            return self._along
        if name == "scaled_dot_product_attention":
            return self._attention
        if name == "constant_pad_nd":
            return self._pad
        if name == "index":
            return self._indexed
        tags = getattr(node.target, "tags", ())
        if name in _POINTWISE or torch.Tag.pointwise in tags:
            return self._pointwise
        return self._unknown

    def _operands(self, node: Node) -> list[tuple[Node, Value]]:
        found: list[tuple[Node, Value]] = []
        for each in node.all_input_nodes:
            value = self.found.values[each]
            found += [(each, v) for v in _flat(value)]
        return found

    def _unknown(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        for _, value in operands:
            self._use_whole(value, node)
        self._give_up([v for _, v in operands], f"{name} is not known to work on parts")
        return _plain(node, any(v.learned for _, v in operands))

    def _use_whole(self, value: Value, node: Node) -> None:
        if value.param is not None and value.kind != SPLIT:
            self.found.whole_uses.setdefault(value.param, node.name)

    def _identity(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        value = operands[0][1]
        return [value] * 2 if _is_several(node) else value

    def _argument(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        value, argument = operands[0][1], self.trace.arguments[node.name]
        if value.kind != PLAIN or value.learned or value.param is not None:
            return value
        key = f"{argument.path}:{argument.name}"
        if key not in self.arguments or not prod(value.shape):
            return replace(value, argument=key)
        if self.found.arguments.setdefault(key, value.shape) != value.shape:
            return value
        return Value(value.shape, FREE, self.axis(key, 0, prod(value.shape)).view(value.shape), key)

    def _move(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        value = operands[0][1]
        if value.axes:
            if name in ("t", "numpy_T", "transpose", "permute"):
                flipped = [value.axes[i] for i in _moved_axes(node, name)]
                return Value(tuple(_shape(node) or ()), PLAIN, None, value.param, tuple(flipped), True)
            self._use_whole(value, node)
            value = Value(value.shape, learned=True)
        ids = value.ids
        if ids is None:
            if name not in _COPIES:
                made = _plain(node, value.learned)
                return replace(made, argument=value.argument) if isinstance(made, Value) else made
            if value.shape and prod(value.shape) > _MOST:
                return _plain(node, value.learned)
            ids = torch.arange(1, prod(value.shape) + 1).view(value.shape)
        args = [ids if arg is node.args[0] else arg for arg in node.args]
        kwargs = {
            k: v for k, v in node.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory")
        }
        if any(isinstance(arg, Node) for arg in _leaves([args, kwargs])):
            return self._unknown(node, name, operands)
        if name in ("view", "_unsafe_view"):
            moved: Any = ids.reshape(list(cast("Sequence[int]", args[1])))
        else:
            moved = node.target(*args, **kwargs)  # type: ignore[operator]
        if value.kind == SPLIT and name in _COPIES and moved.numel() > ids.numel():
            self.found.copied.append((self.labels.united, torch.unique(ids)))

        def make(each: Tensor) -> Value:
            return Value(tuple(each.shape), value.kind, each, value.param, (), value.learned, value.argument)

        return [make(each) for each in moved] if isinstance(moved, (list, tuple)) else make(moved)

    def _indexed(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        """With indices that the code of the model contains."""
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

    def _pad(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        value = operands[0][1]
        if value.kind != SPLIT:
            self._use_whole(value, node)
            return _plain(node, value.learned)
        padding: Any = node.args[1]
        last = value.ids
        assert last is not None
        for number in range(len(padding) // 2):
            if (padding[2 * number] or padding[2 * number + 1]) and varies(last, last.ndim - 1 - number):
                return self._unknown(node, name, operands)
        moved = torch.nn.functional.pad(last, list(padding))
        return Value(tuple(moved.shape), SPLIT, moved, learned=True)

    def _join_parts(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        parts: Any = node.args[0]
        dim = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))  # type: ignore[arg-type]
        values: list[Value] = [self.found.values[each] for each in parts]
        learned = any(v.learned for v in values)
        if not any(v.kind == SPLIT for v in values):
            for value in values:
                self._use_whole(value, node)
            shape = _shape(node)
            if name != "stack" and any(v.ids is not None and v.kind == PLAIN for v in values):
                made = [
                    v.ids
                    if v.ids is not None and v.kind == PLAIN
                    else torch.arange(1, prod(v.shape) + 1).view(v.shape)
                    for v in values
                ]
                return Value(shape or (), PLAIN, torch.cat(made, dim), learned=learned)
            return _plain(node, learned)
        width = len(values[0].shape)
        across = dim % width if name != "stack" else None
        shared = {d for v in values if v.kind == PLAIN for d in v.dims() if d % width != across}
        ids: list[Tensor] = []
        for place, value in zip(parts, values, strict=True):
            if value.kind == PLAIN:
                ids.append(torch.zeros(value.shape, dtype=torch.int64))
                continue
            if value.kind == FREE:
                self.found.adopted.setdefault(node, set()).add(place)
            assert value.ids is not None
            together = (
                self.labels.merged(value.ids, sorted(shared)).expand(value.shape) if shared else value.ids
            )
            ids.append(together)
        joined = torch.stack(ids, dim) if name == "stack" else torch.cat(ids, dim)
        return Value(tuple(joined.shape), SPLIT, joined, learned=True)

    def _written(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        """A part of the first tensor is replaced by the second."""
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

    def _pointwise(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        shape = _shape(node)
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
                shape, PLAIN, _copies(shape, {d for _, v in operands for d in v.dims()}), learned=learned
            )
        return Value(shape, learned=learned)

    def _adopts(self, base: Tensor, value: Value) -> bool:
        """Whether each element of ``value`` meets one label only, and some."""
        ids, base = torch.broadcast_tensors(value.ids, base)  # type: ignore[arg-type]
        if bool((base == NONE).any()):
            return False
        pairs = torch.unique(torch.stack([ids.flatten(), base.flatten()]), dim=1)
        return pairs.shape[1] == torch.unique(pairs[0]).numel()

    def _along(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        value, shape = operands[0][1], _shape(node)
        if _is_several(node):
            shape = tuple(node.meta["val"][0].shape)
        self._use_whole(value, node)
        if value.kind != SPLIT or shape is None or len(operands) > 1:
            return self._unknown(node, name, operands) if value.kind == SPLIT else _plain(node, value.learned)
        given: Any = node.kwargs.get(
            "dim", node.args[_ALONG[name]] if len(node.args) > _ALONG[name] else None
        )
        dims = (
            list(range(len(value.shape)))
            if given is None or given == []
            else [given]
            if isinstance(given, int)
            else list(given)
        )
        merged = self.labels.merged(value.ids, dims)  # type: ignore[arg-type]
        if name in _KEEPS_SHAPE:
            return Value(shape, SPLIT, merged.expand(shape), learned=True)
        made = Value(shape, SPLIT, merged.reshape(shape), learned=True)
        return [made, made] if _is_several(node) else made

    def _norm(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
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
        return [made, Value(()), Value(())] if _is_several(node) else made

    def _embedding(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        weight = self.found.values[cast("Node", node.args[0])]
        shape = _shape(node)
        others = [v for _, v in operands if v is not weight]
        self._give_up(others, "it selects rows of an embedding")
        if weight.param is None or weight.axes != (0, 1) or shape is None:
            return _plain(node, True)
        return Value(shape, FREE, self.axis(weight.param, 1, shape[-1]).expand(shape), weight.param, (), True)

    # ------------------------------------------------------------------------------------ products

    def _product(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        values = self.found.values
        args: list[Any] = list(node.args)
        bias = None
        if name in ("addmm", "baddbmm"):
            bias, args = args[0], args[1:]
        elif name == "linear":
            bias = args[2] if len(args) > 2 else node.kwargs.get("bias")
        left, right = values[args[0]], values[args[1]]
        if right.axes and len(right.shape) == 2:
            outward, inward = (
                (right.axes[0], right.axes[1]) if name == "linear" else (right.axes[1], right.axes[0])
            )
            sizes = (right.shape[0], right.shape[1]) if name == "linear" else (right.shape[1], right.shape[0])
            return self._linear(node, args[0], left, right.param, outward, inward, sizes, bias)
        if name == "linear":
            return self._unlabelled_linear(node, left, right, bias, operands)
        shape = _shape(node)
        made = self._contracted(node, left, right, shape)
        if bias is not None:
            place = bias
            made = self._combined(node, shape, [(node, made), (place, values[place])])  # type: ignore[arg-type]
        return made

    def _unlabelled_linear(
        self, node: Node, left: Value, right: Value, bias: Any, operands: list[tuple[Node, Value]]
    ) -> Any:
        """With a weight that stays whole."""
        if left.kind != SPLIT or right.kind != PLAIN:
            return self._unknown(node, "linear", operands)
        return self._shared(node, left, "", bias)

    def _linear(
        self,
        node: Node,
        place: Node,
        x: Value,
        param: str,
        outward: int,
        inward: int,
        sizes: tuple[int, int],
        bias: Any,
    ) -> Value:
        shape = _shape(node)
        assert shape is not None
        bias_value = self.found.values[bias] if isinstance(bias, Node) else None
        bias_name = bias_value.param if bias_value is not None else None
        if x.kind != SPLIT:
            self._use_whole(x, node)
            if param in self.second.values() or self.second.get(param) in self.found.rows:
                return _plain(node, True)
            labels = self.axis(param, outward, sizes[0])
            self.found.inputs.setdefault(param, source(place))
            if self.found.columns.setdefault(param, outward) != outward or param in self.found.rows:
                self.labels.stick(labels, f"{param} is used in two ways")
            self.found.linears[node] = ("column", param, bias_name)
            self.found.entries[node] = place
            made = Value(shape, SPLIT, labels.expand(shape), learned=True)
            if bias_value is not None:
                made = self._combined(node, shape, [(node, made), (bias, bias_value)])
            return made
        assert x.ids is not None
        flat = x.ids.reshape(-1, x.ids.shape[-1])
        if not bool((flat == flat[0]).all()):
            return self._shared(node, x, param, bias)
        if bool((flat[0] == NONE).any()):
            self.labels.stick(x.ids, f"the input of {param} is only partly split")
        labels = self.axis(param, inward, sizes[1])
        self.labels.unite(labels, flat[0])
        if self.found.rows.setdefault(param, inward) != inward or param in self.found.columns:
            self.labels.stick(labels, f"{param} is used in two ways")
        self.found.linears[node] = ("row", param, bias_name)
        if bias_value is not None:
            self._use_whole(bias_value, node)
        return Value(shape, learned=True)

    def _shared(self, node: Node, x: Value, param: str, bias: Any) -> Value:
        """One matrix applied to each part on its own, such as to every head."""
        shape = _shape(node)
        assert shape is not None and x.ids is not None
        if param:
            self.found.whole_uses.setdefault(param, node.name)
        merged = self.labels.merged(x.ids, [-1]).expand(shape)
        if isinstance(bias, Node):
            self._use_whole(self.found.values[bias], node)
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
        """A product uses one matrix for several of the other side (one head of keys for all queries)."""
        if value.kind != SPLIT or other.kind != SPLIT or value.ids is None or other.ids is None:
            return
        sizes = (*(1,) * (len(other.shape) - len(value.shape)), *value.shape)
        batch = range(-len(other.shape), -2)
        if any(sizes[d] == 1 < other.shape[d] and varies(other.ids, d) for d in batch):
            self.found.copied.append((self.labels.united, torch.unique(value.ids)))

    def _attention(self, node: Node, name: str, operands: list[tuple[Node, Value]]) -> Any:
        values = [self.found.values[arg] if isinstance(arg, Node) else None for arg in node.args[:4]]
        query, key, value = values[:3]
        shape = _shape(node)
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
        ids = value.ids if value.ids is not None else torch.arange(1, prod(value.shape) + 1).view(value.shape)
        if value.kind == SPLIT:
            self.found.copied.append((self.labels.united, torch.unique(ids)))
        ids = ids.repeat_interleave(times, -3)
        return Value(tuple(ids.shape), value.kind, ids, value.param, (), value.learned)


def source(node: Node) -> Node:
    """Where the same values come from."""
    while node.op == "call_function" and operation_name(node) in _IDENTITY and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_move(node: Node) -> bool:
    """Whether it computes nothing."""
    return operation_name(node) in _MOVES | _IDENTITY or operation_name(node) == "getitem"


def is_elementwise(node: Node, *, moves: bool = False) -> bool:
    """Whether each element of the result comes from elements at its place. ``moves``: or from elsewhere, unchanged."""
    name = operation_name(node)
    pointwise = name in _POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or name in _IDENTITY or (moves and (name in _MOVES or name in ("getitem", "roll")))


def operation_name(node: Node) -> str:
    """Such as "linear"."""
    if node.target is operator.getitem:
        return "getitem"
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(node.target, "__name__", node.target)))


def _shape(node: Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(int(size) for size in value.shape) if isinstance(value, Tensor) else None


def _is_several(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value)


def _plain(node: Node, learned: bool = False) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return [
            Value(tuple(each.shape), learned=learned) if isinstance(each, Tensor) else Value(())
            for each in value
        ]
    return Value(_shape(node) or (), learned=learned)


def _copies(shape: tuple[int, ...], dims: set[int]) -> Tensor | None:
    """Which elements are copies of each other if they differ only along ``dims`` (counted from the end)."""
    sizes = [size if dim - len(shape) in dims else 1 for dim, size in enumerate(shape)]
    if prod(sizes) == prod(shape) or prod(shape) > _MOST:
        return None
    return torch.arange(1, prod(sizes) + 1).view(sizes).expand(shape)


def _flat(value: Any) -> list[Value]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return [value]


def _moved_axes(node: Node, name: str) -> Sequence[int]:
    if name in ("t", "numpy_T"):
        return (1, 0)
    if name == "permute":
        return [int(d) % 2 for d in node.args[1]]  # type: ignore[union-attr]
    first, second = (int(d) % 2 for d in node.args[1:3])  # type: ignore[arg-type]
    return (1, 0) if first != second else (0, 1)
