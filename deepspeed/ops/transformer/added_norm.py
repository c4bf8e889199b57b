"""The step between the parts of a transformer layer: dropout, the sum with the residual, and the norm of the sum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops import gpu
from deepspeed.ops.transformer.dropout import dropout, new_seed, runs_here


def added_norm(
    x: Tensor, ratio: float, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``x`` after dropout plus ``residual``, and the layer norm of that: on a GPU by one kernel, forward and
    backward."""
    if (
        runs_here(x, ratio)
        and gpu.usable(x, residual, weight, bias)
        and not torch.is_autocast_enabled("cuda")
    ):
        from deepspeed.ops.gpu import norms  # imports Triton

        if norms.takes(x, residual, weight, bias) and residual.dtype is x.dtype:
            seed = new_seed() if ratio > 0 else 0
            return norms.AddedNorm.apply(x, residual, weight, bias, max(ratio, 0.0), seed, eps, True)
    total = dropout(x, ratio, residual)
    return total, functional.layer_norm(total, weight.shape, weight, bias, eps)
