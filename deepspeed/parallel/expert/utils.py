"""Expert parameters, and optimizer groups for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.parallel.expert.layer import MoE

MAX_GROUP_SIZE = 178956971
"""Documented maximum number of elements of an expert parameter group."""


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether ``m`` has mixture-of-experts layers, and the number of experts of the last one (0 if none)."""
    counts = [layer.num_experts for layer in m.modules() if isinstance(layer, MoE)]
    return bool(counts), counts[-1] if counts else 0


def is_moe_param(param: Tensor) -> bool:
    """Return whether this is an expert parameter, which differs between ranks: marked by ``allreduce`` False."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split ``params`` into (shared parameters, expert parameters)."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | float = MAX_GROUP_SIZE
) -> list[dict[str, Any]]:
    """Return the groups without expert parameters, followed by groups of these with the same options, one per
    ``group_name``, marked with ``moe: True`` and a name.

    Args:
        param_groups: groups as optimizers take them; ``name`` is optional.
        max_group_size: maximum elements per expert group; math.inf: one group.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense: list[dict[str, Any]] = []
    experts: list[dict[str, Any]] = []
    for group in given:
        shared, spread = split_params_into_shared_and_expert_params(_params_of(group))
        dense.append({**group, "params": shared})
        for name in dict.fromkeys(str(getattr(p, "group_name", None)) for p in spread):
            members = [p for p in spread if str(getattr(p, "group_name", None)) == name]
            experts += [
                {**group, "params": run, "name": name, "moe": True} for run in _runs(members, max_group_size)
            ]
    return dense + experts


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Any]:
    """Return the optimizer's parameters or groups with expert parameters moved to separate groups; unchanged if there
    are none."""
    given = list(model_parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    if not any(is_moe_param(p) for group in groups for p in _params_of(group)):
        return given
    return split_params_into_different_moe_groups_for_optimizer(groups)


def _params_of(group: dict[str, Any]) -> list[nn.Parameter]:
    params = group["params"]
    return [params] if isinstance(params, torch.Tensor) else list(params)  # pyright: ignore[reportReturnType]


def _runs(params: Sequence[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Divide ``params``, in order, into runs of at most ``limit`` elements (or one parameter)."""
    result: list[list[nn.Parameter]] = [[]]
    size = 0
    for param in params:
        numel = getattr(param, "ds_numel", param.numel())
        if result[-1] and size + numel > limit:
            result.append([])
            size = 0
        result[-1].append(param)
        size += numel
    return result
