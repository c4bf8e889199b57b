"""Measured time of each layer, for ``partition_method="profile"``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.parallel.pipeline.specs import Layer, LayerSpec, TiedLayerSpec


def measure(layers: Sequence[Layer], inputs: Any, repeats: int = 3) -> list[float]:
    """Seconds of one forward and backward of each layer, the best of ``repeats``. Layers are built one at a time."""
    found = []
    for layer in layers:
        module: Any = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            module = partial(layer.forward_fn, module)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            with torch.enable_grad():
                outputs = module(_fresh(inputs))
            traced = [t for t in _tensors(outputs) if t.requires_grad]
            wanted = list(module.parameters()) if isinstance(module, nn.Module) else []
            leaves = [p for p in wanted if p.requires_grad]
            if traced and leaves:
                torch.autograd.grad(traced, leaves, [torch.ones_like(t) for t in traced], allow_unused=True)
            times.append(time.perf_counter() - start)
        found.append(min(times))
        inputs = _fresh(outputs)
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _fresh(value: Any) -> Any:
    """Without a graph; what can have a gradient wants one."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, dict):
        return {key: _fresh(item) for key, item in value.items()}
    return type(value)(map(_fresh, value)) if isinstance(value, (tuple, list)) else value


def agreed(durations: list[float]) -> list[float]:
    """Those of rank 0."""
    if dist.get_world_size() == 1:
        return durations
    message = torch.tensor(durations, dtype=torch.float64)
    dist.broadcast(message, src=0)
    return message.tolist()
