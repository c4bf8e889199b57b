"""Tracing of one small forward on the meta device into a graph, without memory for the weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deepspeed.parallel.expert.placement import is_plain_moe
from deepspeed.parallel.sequence.layer import DistributedAttention
from deepspeed.zero.meta import meta_copy

BATCH, LENGTH = 2, 5
"""Batch size and sequence length of the traced run."""


class TraceError(RuntimeError):
    """The model could not be traced; the text says why."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced forward: ``graph`` of ATen operations. ``params``: placeholder name -> the parameter's (first) name in
    the module. ``constants``: placeholder name -> a tensor constant in the forward's code. ``module``: the traced
    module, run with ``inputs``. ``arguments``: node name -> the module argument that it represents, "path:name".
    ``input_nodes``: names of the placeholders of ``inputs``."""

    graph: torch.fx.Graph
    params: Mapping[str, str]
    constants: Mapping[str, Tensor]
    module: nn.Module
    inputs: Mapping[str, Tensor]
    arguments: Mapping[str, str]
    input_nodes: frozenset[str]


class _Flat(nn.Module):
    """Wrapper that flattens the module's output to a tuple of tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        result = self.module(**inputs)
        leaves = tree_leaves(dict(result) if isinstance(result, Mapping) else result)
        return tuple(leaf for leaf in leaves if torch.is_tensor(leaf))


class _ListsAsSlices(TorchFunctionMode):
    """Converts indexes that are lists of numbers (``x[:, [-2]]``) to slices: as tensors on the meta device they would
    have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            lists = [i for i, each in enumerate(index) if _is_list_of_numbers(each)]
            if len(lists) == 1:
                place = lists[0]
                parts = [
                    args[0][(*index[:place], slice(n, n + 1 or None), *index[place + 1 :])]
                    for n in index[place]
                ]
                dim = _dim_of(index, place, args[0].ndim)
                return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        return func(*args, **(kwargs or {}))


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _dim_of(index: tuple[Any, ...], place: int, ndim: int) -> int:
    """Return the dim of the result that entry ``place`` of ``index`` produces."""
    taken = sum(each is not None and each is not Ellipsis for each in index)
    dim = 0
    for each in index[:place]:
        dim += ndim - taken if each is Ellipsis else not isinstance(each, int)
    return dim


def traceable_copy(module: nn.Module) -> nn.Module:
    """Copy ``module`` to the meta device (``meta_copy``), in evaluation mode, with settings such that a forward can be
    traced without other ranks; data dependencies stay the same."""
    copied = meta_copy(module).eval()
    for each in copied.modules():
        if isinstance(each, DistributedAttention):
            each.spg = None
        if is_plain_moe(each):  # a layer of deepspeed.moe
            vars(each)["forward"] = _mixed
        config = getattr(each, "config", None)
        if config is None:
            continue
        for name, value in (
            ("use_cache", False),
            ("_attn_implementation", "eager"),
            ("_experts_implementation", "batched_mm"),
        ):
            with contextlib.suppress(Exception):
                setattr(config, name, value)
        if getattr(each, "gradient_checkpointing", False):
            vars(each)["gradient_checkpointing"] = False
    return copied


def _mixed(hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Stand in for a mixture-of-experts layer, which routes whole tokens: it needs all of its input, and is not
    split."""
    output = torch.softmax(hidden_states, -1)
    return output, output.sum(), output.sum()


def example_inputs(module: nn.Module) -> dict[str, Tensor]:
    """Create inputs on the meta device for a Transformers model, by its ``main_input_name`` and config.

    TraceError: not a Transformers model, or unknown inputs.
    """
    config = getattr(module, "config", None)
    accepted = inspect.signature(module.forward).parameters
    if config is None or "kwargs" in accepted and len(accepted) == 1:
        raise TraceError("only Transformers models can be traced without example inputs")
    inputs: dict[str, Tensor] = {}
    with torch.device("meta"):
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        main = getattr(module, "main_input_name", "input_ids")
        if main == "pixel_values" or ("pixel_values" in accepted and "input_ids" not in accepted):
            vision = getattr(config, "vision_config", config)
            side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
            inputs["pixel_values"] = torch.zeros(BATCH, getattr(vision, "num_channels", 3), side, side)
        elif "input_ids" in accepted or main == "input_ids":
            inputs["input_ids"] = tokens
        elif main in accepted:
            raise TraceError(f"inputs of type {main!r} are not supported")
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
            inputs["decoder_input_ids"] = tokens
    if not inputs:
        raise TraceError("its inputs are unknown")
    return inputs


def _writes_into_others(graph: torch.fx.Graph) -> bool:
    """Return whether an operation writes into a view, or into a tensor that is read later."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node, number in order.items():
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or not isinstance(node.args[0], torch.fx.Node):
            continue
        written = node.args[0]
        if not _is_fresh(written) or any(order[user] > number for user in written.users):
            return True
    return False


def _is_fresh(node: torch.fx.Node) -> bool:
    """Return whether the result does not alias an input, or is the result of an earlier in-place operation."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (
        schema.is_mutable or all(argument.alias_info is None for argument in schema.arguments)
    )


class _Marks:
    """Context manager that marks tensor arguments of modules in the graph, by rolling them by a distance that no model
    uses. (On the meta device no values are moved.)"""

    _FIRST = 1 << 40

    def __init__(self, module: nn.Module) -> None:
        self._paths = {path: each for path, each in module.named_modules() if path and any(each.children())}
        self._arguments: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for path, module in self._paths.items():
            hook = functools.partial(self._mark, path)
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _mark(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = list(inspect.signature(module.forward).parameters)
        marked = [self._rolled(path, name, value) for name, value in zip(names, args, strict=False)]
        return (*marked, *args[len(names) :]), {k: self._rolled(path, k, v) for k, v in kwargs.items()}

    def _rolled(self, path: str, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        self._arguments.append(f"{path}:{name}")
        return torch.roll(value, self._FIRST + len(self._arguments) - 1, 0)

    def found(self, graph: torch.fx.Graph) -> dict[str, str]:
        """Map the names of marker nodes to the arguments that they mark."""
        return {
            node.name: self._arguments[node.args[1][0] - self._FIRST]  # type: ignore[index,operator]
            for node in graph.nodes
            if node.op == "call_function"
            and str(node.target) == "aten.roll.default"
            and node.args[1][0] >= self._FIRST  # type: ignore[index,operator]
        }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    names = ("torch.export", "torch._export", "torch.fx", "torch._subclasses", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def trace(module: nn.Module, inputs: Mapping[str, Tensor] | None) -> Trace:
    """Trace one forward of ``module``, which is on the meta device. ``inputs``: by default ``example_inputs``.

    TraceError: the forward depends on values.
    """
    inputs = example_inputs(module) if inputs is None else inputs
    flat = _Flat(module).eval()
    marks = _Marks(module)
    try:
        with _quiet(), torch.no_grad(), _ListsAsSlices(), marks:
            exported = torch.export.export(flat, (dict(inputs),), strict=False)
            if _writes_into_others(exported.graph):
                exported = exported.run_decompositions({})  # functionalizes writes, but doubles the time
    except Exception as error:
        raise TraceError(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    first = {id(param): name for name, param in module.named_parameters()}
    every = {name: first[id(param)] for name, param in module.named_parameters(remove_duplicate=False)}
    signature = exported.graph_signature
    params = {
        place: every[name.removeprefix("module.")] for place, name in signature.inputs_to_parameters.items()
    }
    constants: dict[str, Tensor] = {}
    for place, name in signature.inputs_to_lifted_tensor_constants.items():
        constant = exported.constants.get(name)
        if isinstance(constant, Tensor) and constant.device.type == "cpu":
            constants[place] = constant
    return Trace(
        exported.graph,
        params,
        constants,
        module,
        inputs,
        marks.found(exported.graph),
        frozenset(str(name) for name in signature.user_inputs),
    )
