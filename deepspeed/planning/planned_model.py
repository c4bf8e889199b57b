"""Facts about a model that a plan needs: its parameters in order, and the groups that forward gathers together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from deepspeed.config.plan import Plan, PrecisionPlan
from deepspeed.zero.gathering.leaf_modules import z3_leaf_module
from deepspeed.zero.layout import ParamSpec
from deepspeed.zero.partitioning import TrainedParams, blocks_of, param_specs, trained_params, with_frozen
from deepspeed.zero.precision import param_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """The parameters of a model. ``specs[i]`` is parameter i: the ``trained`` ones first, then the frozen ones.

    ``calls``: for each call of a forward, in order, the parameters that stage 3 gathers for it. Registration order
    stands in for execution order. ``group_of[i]``: optimizer group of trained parameter i.
    """

    specs: list[ParamSpec]
    trained: int
    group_of: list[int]
    calls: list[list[int]]
    built_itemsizes: list[int]
    """Bytes per element of each parameter as the module was built, before the engine casts it."""
    buffer_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs)


def planned_model_of(
    module: nn.Module, plan: Plan, param_groups: Sequence[dict[str, Any]] | None = None
) -> PlannedModel:
    """Describe ``module``, which may be on the meta device, partitioned, or in use; it is not changed.

    ``param_groups``: the optimizer's; default: all parameters that require a gradient, in one group.
    """
    groups = param_groups
    if groups is None:
        groups = [{"params": [p for p in module.parameters() if p.requires_grad]}]
    trained = trained_params(module, groups)
    everything = with_frozen(module, trained)
    index = {id(param): i for i, param in enumerate(everything.params)}
    number = {id(param): g for g, group in enumerate(groups) for param in group["params"]}
    precision = replace(plan.precision, param=param_dtype(module, plan.precision))
    return PlannedModel(
        specs=param_specs(module, everything, plan, lambda param: cast_dtype(param.dtype, precision)),
        trained=len(trained.params),
        group_of=[number[id(param)] for param in trained.params],
        calls=_calls(module, everything, index),
        built_itemsizes=[param.dtype.itemsize for param in everything.params],
        buffer_bytes=_buffer_bytes(module, precision),
    )


def cast_dtype(dtype: torch.dtype, precision: PrecisionPlan) -> torch.dtype:
    """Return the dtype of a parameter of ``dtype`` after the engine has cast it (``precision.cast_module``)."""
    return precision.param if precision.param is not None and dtype.is_floating_point else dtype


def _buffer_bytes(module: nn.Module, precision: PrecisionPlan) -> int:
    target = precision.buffer
    total = 0
    for buffer in module.buffers():
        dtype = target if target is not None and buffer.is_floating_point() else buffer.dtype
        total += buffer.numel() * dtype.itemsize
    return total


def hooked_modules(module: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Return the hooked modules of stage 3 (``zero/parameter_offload.py``) with their parameters, in registration
    order: blocks and leaf modules are hooked as a whole, other modules with their direct parameters."""
    whole = set(blocks_of(module))
    found: list[tuple[nn.Module, list[nn.Parameter]]] = []
    seen: set[nn.Module] = set()

    def walk(owner: nn.Module) -> None:
        if owner in seen:
            return
        seen.add(owner)
        together = owner in whole or z3_leaf_module(owner)
        params = list(owner.parameters(recurse=together))
        if params:
            found.append((owner, params))
        if not together:
            for child in owner.children():
                walk(child)

    walk(module)
    return found


def _calls(module: nn.Module, everything: TrainedParams, index: dict[int, int]) -> list[list[int]]:
    """Return the parameters by call of a hooked module, plus a last call for those that belong to no module."""
    calls = [[index[id(param)] for param in params] for _, params in hooked_modules(module)]
    reached = {i for call in calls for i in call}
    outside = [i for i in range(len(everything.params)) if i not in reached]
    return [*calls, outside] if outside else calls
