"""Detection of embeddings and output heads whose vocabulary can be split over the ranks.

The vocabulary is the rows of the embedding that looks up an input of the model. A head is a linear layer with as many
outputs, from which results of the model are computed elementwise; it may be tied to the embedding's weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field

from torch import nn
from torch.fx import Node

from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.planning.plan import VocabularyPlan
from deepspeed.parallel.tensor.planning.rules import linear_dims
from deepspeed.parallel.tensor.planning.trace import Trace
from deepspeed.parallel.tensor.planning.values import is_elementwise, operation_name


@dataclass(slots=True)
class _Uses:
    """Uses of a weight: paths of modules by kind."""

    embeddings: set[str] = field(default_factory=set)
    heads: set[str] = field(default_factory=set)
    biases: set[str | None] = field(default_factory=set)
    otherwise: bool = False


def find_vocabulary(run: Trace, ranks: int, whole: Container[str]) -> tuple[VocabularyPlan, ...]:
    """Find the vocabularies that can be split. ``whole``: names of parameters that must stay whole."""
    uses: dict[str, _Uses] = defaultdict(_Uses)
    for node in run.graph.nodes:
        if node.op == "call_function":
            _note(run, node, uses)
    params = dict(run.module.named_parameters())
    sizes = {params[name].shape[0] for name, each in uses.items() if each.embeddings}
    found = []
    for name, each in uses.items():
        weight = params[name]
        if (
            name in whole
            or each.otherwise
            or weight.ndim != 2
            or weight.shape[0] not in sizes
            or len(each.biases) > 1
        ):
            continue
        bias = next(iter(each.biases), None)
        parents = {path.rpartition(".")[0] for path in each.heads}
        if bias is not None and _holders(run.module, params[bias]) - each.heads - parents:
            continue
        unused = _holders(run.module, weight) - each.embeddings - each.heads
        if any(type(run.module.get_submodule(path)) is not nn.Embedding for path in unused):
            continue
        if weight.shape[0] < ranks or any(
            not _is_plain_embedding(run.module.get_submodule(p)) for p in each.embeddings
        ):
            continue
        cut = Cut.even(0, weight.shape[0], ranks)
        embeddings = tuple(sorted(each.embeddings | unused))
        found.append(VocabularyPlan(name, cut, embeddings, tuple(sorted(each.heads)), bias))
    return tuple(found)


def _note(run: Trace, node: Node, uses: dict[str, _Uses]) -> None:
    operation = operation_name(node)
    for place in node.all_input_nodes:
        origin = _origin(place)
        name = run.params.get(origin.name)
        if name is None or (operation in ("t", "numpy_T", "transpose") and len(place.meta["val"].shape) == 2):
            continue
        if operation == "embedding" and place is node.args[0]:
            if _is_input(run, node.args[1]):
                uses[name].embeddings.add(_path(node))
            else:
                uses[name].otherwise = True
        elif (
            operation in ("linear", "matmul", "mm", "addmm")
            and place is _factors(node)[0]
            and _is_result(node)
            and linear_dims(run.module.get_submodule(_path(node))) is not None
        ):
            uses[name].heads.add(_path(node))
            bias = _factors(node)[1]
            uses[name].biases.add(run.params.get(bias.name) if isinstance(bias, Node) else None)
        elif len(place.meta["val"].shape) == 2:
            uses[name].otherwise = True


def _origin(node: Node) -> Node:
    """Return the node of a weight, looking through transposes."""
    while node.op == "call_function" and operation_name(node) in ("t", "numpy_T", "transpose"):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_input(run: Trace, node: object) -> bool:
    """Return whether the token ids are computed elementwise from a single input of the model."""
    if not isinstance(node, Node):
        return False
    while node.op == "call_function" and is_elementwise(node) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.name in run.input_nodes


def _factors(node: Node) -> tuple[object, object]:
    """Return the weight and the bias of a linear layer."""
    if operation_name(node) == "addmm":
        return node.args[2], node.args[0]
    return node.args[1], node.args[2] if len(node.args) > 2 else None


def _is_result(node: Node) -> bool:
    """Return whether the node is used only to compute results of the model, elementwise."""
    reached, seen = False, set()
    pending = list(node.users)
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.op == "output":
            reached = True
        elif each.op == "call_function" and is_elementwise(each):
            pending += each.users
        else:
            return False
    return reached


def _path(node: Node) -> str:
    """Return the path of the innermost module that contains the node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("module").removeprefix(".") if stack else ""


def _holders(module: nn.Module, param: nn.Parameter) -> set[str]:
    return {
        path
        for path, each in module.named_modules()
        if any(own is param for own in each._parameters.values())
    }


def _is_plain_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq
