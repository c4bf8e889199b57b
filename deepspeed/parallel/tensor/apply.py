"""Application of a tensor-parallel plan: replaces layers, slices weights, adjusts attributes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed.parallel.tensor.low_rank  # noqa: F401 (declares the split forms of layers with adapters)
from deepspeed.base.module_utils import move_hooks
from deepspeed.base.sharded import full_shape, is_zero_param
from deepspeed.checkpoint.placement import place, placement_of
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.cuts import replicated
from deepspeed.parallel.tensor.embedding import VocabParallelEmbedding
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer, SharedInput, part_of, tp_classes_of
from deepspeed.parallel.tensor.mappings import copy_to, reduce_from
from deepspeed.parallel.tensor.planning.changes import apply_changes
from deepspeed.parallel.tensor.planning.plan import (
    ParameterPlan,
    PlanError,
    TensorParallelPlan,
    VocabularyPlan,
)
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters

OnSwap = Callable[[nn.Parameter, nn.Parameter], None]
_CLASSES = {"column": LinearLayer, "row": LinearAllreduce, "vocabulary": VocabParallelEmbedding}


def apply_plan(module: nn.Module, plan: TensorParallelPlan, group: Communicator, on_swap: OnSwap) -> None:
    """Apply ``plan`` to ``module`` in place. ``on_swap(old, new)`` is called for each replaced parameter.

    PlanError: the plan names a missing parameter, or cuts the parameters of one layer differently.
    """
    _check(module, plan)
    _agree(module, group)
    inputs: dict[str, Any] = defaultdict(SharedInput)
    layers: dict[str, dict[str, ParameterPlan]] = defaultdict(dict)
    for name, each in plan.parameters.items():
        path, _, own_name = name.rpartition(".")
        layers[path][own_name] = each
    for path, own in layers.items():
        _change_layer(module, path, own, plan, group, inputs, on_swap)
    for vocabulary in plan.vocabulary:
        _spread_vocabulary(module, vocabulary, group, on_swap)
    apply_changes(module, plan, group.rank)

    def summed_gradient(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return copy_to(output, group)

    for path in plan.outputs_summed:
        module.get_submodule(path).register_forward_hook(summed_gradient)
    params = dict(module.named_parameters())
    for name in plan.summed:
        if params[name].requires_grad:
            params[name].register_hook(functools.partial(_summed, group=group))


def _agree(module: nn.Module, group: Communicator) -> None:
    """Broadcast weights from the group's first rank, except parts that layers already hold, and mark uncut parameters
    as replicated, counted on that rank. Collective."""
    with torch.no_grad():
        for param in module.parameters():
            placement = placement_of(param)
            if "tp" in placement.split and tuple(placement.global_shape) != tuple(full_shape(param)):
                continue  # a part, which differs from rank to rank
            # Parameters made by zero.Init already come from the first rank.
            if not is_zero_param(param) and param.numel():
                flat = param.data.contiguous()
                group.broadcast(flat.view(-1).view(torch.uint8), src=0).wait()
                if flat is not param.data:
                    param.data.copy_(flat)
            if placement.split == ():
                place(param, replicated(full_shape(param), group.rank))


def _check(module: nn.Module, plan: TensorParallelPlan) -> None:
    known = dict(module.named_parameters())
    missing = [name for name in (*plan.parameters, *plan.summed) if name not in known]
    if missing:
        raise PlanError(f"the plan names {missing[0]}, which the module does not have")


def _change_layer(
    module: nn.Module,
    path: str,
    own: dict[str, ParameterPlan],
    plan: TensorParallelPlan,
    group: Communicator,
    inputs: dict[str, Any],
    on_swap: OnSwap,
) -> None:
    layer = module.get_submodule(path)
    weight = own.get("weight")
    if weight is None or weight.kind == "sliced":
        for name, each in own.items():
            _slice(layer, name, each, group, on_swap)
        return
    options: dict[str, Any] = {}
    if weight.kind == "column":
        bias = own.get("bias")
        if bias is not None and bias.cut.parts != weight.cut.parts:
            raise PlanError(f"weight and bias of {path} are split differently")
        shared = plan.inputs.get(path)
        options["gather_output"] = weight.gather
        options["shared_input"] = _same_input if shared is None else inputs[shared]
    made = _class_for(layer, weight.kind)(_known_linear(layer), group, cut=weight.cut, name=path, **options)
    made.train(layer.training)
    for name, old in layer.named_parameters(recurse=False):
        on_swap(old, getattr(made, name))
    _replace(module, layer, made)


def _replace(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` everywhere in ``module``."""
    for each in list(module.modules()):
        for name, child in each._modules.items():
            if child is old:
                each._modules[name] = new


def _spread_vocabulary(module: nn.Module, plan: VocabularyPlan, group: Communicator, on_swap: OnSwap) -> None:
    params = dict(module.named_parameters())
    olds = [params[name] for name in (plan.weight, plan.bias) if name is not None]
    layers = [(path, module.get_submodule(path)) for path in (*plan.embeddings, *plan.heads)]
    weight = bias = None
    for path, layer in layers:
        if path in plan.heads:
            made = _class_for(layer, "column")(
                _known_linear(layer), group, cut=plan.cut, weight=weight, stand_in=True, name=path
            )
            bias = made.bias = made.bias if bias is None else bias
        else:
            made = _class_for(layer, "vocabulary")(layer, group, cut=plan.cut, weight=weight, name=path)
        weight = made.weight
        _replace(module, layer, made.train(layer.training))
    for old, new in zip(olds, (weight, bias), strict=False):
        assert new is not None
        for each in module.modules():
            for name, param in each._parameters.items():
                if param is old:
                    each._parameters[name] = new
        on_swap(old, new)


def _slice(layer: nn.Module, name: str, plan: ParameterPlan, group: Communicator, on_swap: OnSwap) -> None:
    if tp_classes_of(layer):
        raise PlanError(
            f"{type(layer).__name__} cannot be split along the {plan.cut.dim}. dim of its {name}: leave it out of "
            "compression_training's groups, or out of the tensor-parallel plan"
        )
    old: Any = getattr(layer, name)
    with GatheredParameters([old]), torch.no_grad():
        new = part_of(old, plan.cut, group)
    setattr(layer, name, new)
    if isinstance(layer, nn.Embedding) and plan.cut.dim == 1:
        layer.embedding_dim = plan.cut.extents[group.rank]
    on_swap(old, new)


def _class_for(layer: nn.Module, kind: str) -> Any:
    return tp_classes_of(layer).get(kind, _CLASSES[kind])


def _known_linear(layer: nn.Module) -> nn.Module:
    """Return ``layer``, or a plain linear layer with its parameters if it is an ``nn.Linear`` with a custom forward
    (tracing has shown that it computes the same)."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward or tp_classes_of(layer):
        return layer
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    plain.weight, plain.bias = layer.weight, layer.bias
    move_hooks(layer, plain)
    return plain


def _same_input(inputs: Tensor, group: Communicator, sequence: object) -> Tensor:
    """Return the input unchanged: its gradient is summed where the input is produced."""
    return inputs


def _summed(grad: Tensor, group: Communicator) -> Tensor:
    with torch.no_grad():
        return reduce_from(grad, group)
