"""Facts about the tensors of a graph, and the families of operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from deepspeed.parallel.tensor.planning.labels import Labels, varies

SharableChannels = Mapping[tuple[str, int], Tensor]
PLAIN, FREE, SPLIT = "plain", "free", "split"
MAX_NUMEL = 1 << 22
"""Maximum size of tensors whose elements get individual ids."""


@dataclass(frozen=True, slots=True)
class Value:
    """Facts about one tensor of the graph.

    PLAIN: replicated; equal ``ids``, if any, mark copies of the same element. FREE: elements of one parameter (``ids``
    are its own labels), to be cut if its users require it. SPLIT: ``ids`` are labels. ``param`` and ``axes``: the
    tensor is a parameter matrix, possibly transposed. ``learned``: it depends on some weight.
    """

    shape: tuple[int, ...]
    kind: str = PLAIN
    ids: Tensor | None = None
    param: str | None = None
    axes: tuple[int, ...] = ()
    learned: bool = False
    argument: str | None = None
    """Name of the module argument that it is, with at most its layout changed."""

    def own_ids(self) -> Tensor:
        """Return ``ids``, by default a different one for each element."""
        return torch.arange(1, prod(self.shape) + 1).view(self.shape) if self.ids is None else self.ids

    def dims(self) -> list[int]:
        """Return the dims along which elements differ, counted from the end (-1, -2, ...)."""
        count = len(self.shape)
        if self.ids is not None:
            return [d - count for d in range(count) if varies(self.ids, d)]
        return [d - count for d in range(count) if self.shape[d] > 1]


@dataclass(slots=True)
class LabelledGraph:
    """Result of propagating labels through a graph. ``axis_labels``: labels of a parameter along one dim. ``columns``,
    ``rows``: weights of linear layers that create, or end, labels -> the dim labelled; ``used_whole``: parameters used
    whole -> node name."""

    labels: Labels
    axis_labels: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    values: dict[Node, Any] = field(default_factory=dict)
    entries: dict[Node, Node] = field(default_factory=dict)
    """Node of a column layer -> node of its input."""
    linears: dict[Node, tuple[str, str, str | None]] = field(default_factory=dict)
    """Linear node -> (kind: column or row; its weight; its bias)."""
    adopted: dict[Node, set[Node]] = field(default_factory=dict)
    """Node -> FREE operands that take over the labels that they meet."""
    used_whole: dict[str, str] = field(default_factory=dict)
    met: list[tuple[Tensor, str]] = field(default_factory=list)
    """(labels, argument): labels united only because the argument varies along them."""
    arguments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Arguments that may be cut -> their shape; the labels of all elements are under axis 0."""
    copied: list[tuple[int, Tensor]] = field(default_factory=list)
    """(number of unions so far, labels) of elements that an operation copied, i.e. shared heads."""


IDENTITY = frozenset(
    "to clone contiguous detach alias dropout native_dropout _to_copy type_as lift_fresh_copy lift_fresh float "
    "alias_copy detach_ dropout_ feature_dropout".split()
)
MOVES = frozenset(
    "view reshape _unsafe_view transpose permute t unsqueeze squeeze expand slice select split split_with_sizes chunk "
    "unbind flatten unflatten movedim repeat repeat_interleave narrow flip expand_as swapaxes numpy_T roll "
    "tensor_split unsafe_chunk unsafe_split view_as reshape_as broadcast_to".split()
)
COPIES = frozenset("expand repeat repeat_interleave expand_as broadcast_to".split())
POINTWISE = frozenset(
    "masked_fill masked_fill_ where clamp_min add_ mul_ sub_ div_ gelu gelu_ silu silu_ relu relu_ tanh_ sigmoid_ "
    "leaky_relu hardtanh softplus threshold pow maximum minimum glu_ add sub mul div rsub softcap clamp copy_ copy "
    "elu elu_ selu mish hardswish hardsigmoid log_sigmoid logical_and logical_or bitwise_and".split()
)
ALONG = {"softmax": 1, "_softmax": 1, "log_softmax": 1, "_log_softmax": 1, "sum": 1, "mean": 1, "amax": 1, "amin": 1,
          "var": 1, "max": 1, "min": 1, "std": 1, "logsumexp": 1, "cumsum": 1, "norm": 2,
          "linalg_vector_norm": 2, "any": 1, "all": 1}  # fmt: skip
UNIFORM = frozenset(
    "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor empty empty_like "
    "new_empty empty_strided new_empty_strided".split()
)
KEEPS_SHAPE = frozenset("softmax _softmax log_softmax _log_softmax cumsum".split())


def source(node: Node) -> Node:
    """Return the origin of a node's values, looking through identity operations."""
    while node.op == "call_function" and operation_name(node) in IDENTITY and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_move(node: Node) -> bool:
    """Return whether the node only moves data."""
    return operation_name(node) in MOVES | IDENTITY or operation_name(node) == "getitem"


def is_elementwise(node: Node) -> bool:
    """Return whether each element of the result depends only on operands' elements at the same position, or is one of
    them that has moved."""
    return is_pointwise(node) or is_move(node)


def is_pointwise(node: Node) -> bool:
    return operation_name(node) in POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def operation_name(node: Node) -> str:
    """Return the name of the operation, such as "linear"."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(node.target, "__name__", node.target)))


def shape_of(node: Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(int(size) for size in value.shape) if isinstance(value, Tensor) else None


def is_several(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value)


def plain_value(node: Node, learned: bool = False) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return [
            Value(tuple(each.shape), learned=learned) if isinstance(each, Tensor) else Value(())
            for each in value
        ]
    return Value(shape_of(node) or (), learned=learned)


def copies_along(shape: tuple[int, ...], dims: set[int]) -> Tensor | None:
    """Return ids that are equal for copies, given that elements differ only along ``dims`` (counted from the end)."""
    sizes = [size if dim - len(shape) in dims else 1 for dim, size in enumerate(shape)]
    if prod(sizes) == prod(shape) or prod(shape) > MAX_NUMEL:
        return None
    return torch.arange(1, prod(sizes) + 1).view(sizes).expand(shape)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def values_in(value: Any) -> list[Value]:
    return [each for each in as_list(value) if isinstance(each, Value)]


def moved_axes(node: Node, name: str) -> Sequence[int]:
    if name in ("t", "numpy_T"):
        return (1, 0)
    if name == "permute":
        return [int(d) % 2 for d in node.args[1]]  # type: ignore[union-attr]
    first, second = (int(d) % 2 for d in node.args[1:3])  # type: ignore[arg-type]
    return (1, 0) if first != second else (0, 1)
