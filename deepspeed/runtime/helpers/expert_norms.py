"""Documented helpers: norms of models whose experts are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from deepspeed.accelerator import get_accelerator


def get_norm_with_moe_layers_fast(all_groups_norm: Tensor | float, group: Any) -> float:
    """The mean of each rank's norm over the ranks of ``group``."""
    norm = torch.tensor([float(all_groups_norm)], dtype=torch.float64)
    norm = norm.to(get_accelerator().current_device_name())
    torch.distributed.all_reduce(norm, group=group)
    return float(norm) / torch.distributed.get_world_size(group)


def norm_with_experts(
    other_norm: Tensor | float,
    norms_of_experts: Sequence[tuple[Tensor, Any]],
    norm_type: float,
) -> float:
    """Norm of a model from that of its other parameters and, for each expert group, this rank's norm and the ranks that
    hold the rest."""
    parts = [float(other_norm)]
    for norm, group in norms_of_experts:
        value = torch.tensor([float(norm) ** norm_type if math.isfinite(norm_type) else float(norm)])
        value = value.double().to(get_accelerator().current_device_name())
        kind = torch.distributed.ReduceOp.SUM if math.isfinite(norm_type) else torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(value, op=kind, group=group)
        parts.append(float(value) ** (1.0 / norm_type) if math.isfinite(norm_type) else float(value))
    if math.isinf(norm_type):
        return max(parts)
    return math.fsum(part**norm_type for part in parts) ** (1.0 / norm_type)
