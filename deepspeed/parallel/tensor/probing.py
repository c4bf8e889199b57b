"""Detection of linear layers of unknown classes, by running them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import full_shape


def transposed_by_trial(layer: nn.Module) -> bool | None:
    """Return whether ``layer(x)`` is ``x @ weight + bias`` (True), ``x @ weight.t() + bias`` (False), or neither
    (None).

    Runs in fp64 with random weights, so that special values do not mislead; only for layers whose only parameters are
    ``weight`` [2-D] and optionally ``bias``.
    """
    params = dict(layer.named_parameters())
    if "weight" not in params or params.keys() - {"weight", "bias"}:
        return None
    shapes: dict[str, Any] = {name: full_shape(param) for name, param in params.items()}
    if len(shapes["weight"]) != 2:
        return None
    source = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=source, dtype=torch.float64)

    tried = {name: values(*shape) for name, shape in shapes.items()}
    weight, bias = tried["weight"], tried.get("bias")
    for transposed in (False, True):
        matrix = weight.t() if transposed else weight
        if bias is not None and bias.shape != (len(matrix),):
            continue
        inputs = values(3, matrix.shape[1])
        try:
            with torch.no_grad():
                found = torch.func.functional_call(layer, tried, (inputs,))
        except Exception:  # any error: it is no matrix product of a single tensor
            continue
        if isinstance(found, Tensor) and torch.allclose(found, nn.functional.linear(inputs, matrix, bias)):
            return transposed
    return None
