"""Assignment of layers to stages in a ``PipelineModule``; trainers override these methods by name."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.staged import Staged
from deepspeed.ops.partitions import partition_balanced, partition_uniform
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.values import map_tensors
from deepspeed.parallel.pipeline.specs import Layer, LayerSpec, TiedLayerSpec, trained_numel, type_name
from deepspeed.zero.gradients.backward import tensors_in


class LayerPartition(Staged):
    """The part of ``PipelineModule`` that sets ``parts``."""

    num_stages: int
    stage_id: int
    chunks: int
    parts: list[int]
    _layer_specs: list[Layer]
    _profile_input: Any

    def _partition_layers(self, method: str = "uniform") -> None:
        """Set ``parts``: the bounds of the runs of layers, ``chunks`` per stage. Subclasses may set other bounds.
        Called during construction, once topology and layer specs are known."""
        kind, weights = method.strip().lower(), None
        if kind == "profile" and self._profile_input is not None:
            weights = broadcast_durations(measure_layers(self._layer_specs, self._profile_input))
        if kind == "parameters":
            weights = self._count_layer_params()
        self.parts = partition(self._layer_specs, self.num_stages * self.chunks, method, weights)
        if self.chunks == 1:
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _set_bounds(self, start: int, stop: int) -> None:
        """Set the range of layers that this stage holds. PipelineError: it contradicts ``parts``."""
        expected = self.parts[self.stage_id : self.stage_id + 2]
        if [start, stop] != list(expected):
            raise PipelineError(
                f"_set_bounds({start}, {stop}) contradicts the bounds {expected} of stage {self.stage_id} "
                "in self.parts: set self.parts for all stages first"
            )
        self._local_start, self._local_stop = start, stop  # subclasses read them

    def _count_layer_params(self) -> list[int]:
        """Return the trained elements of every layer, which method "parameters" balances."""
        return [trained_numel(layer) for layer in self._layer_specs]

    def _find_layer_type(self, layername: str) -> list[int]:
        """Return the indices of the layers whose class name matches a regex. ValueError: there is none."""
        return layers_of_type(self._layer_specs, layername)


# Measured time of each layer, for ``partition_method="profile"``.


def measure_layers(layers: Sequence[Layer], inputs: Any, repeats: int = 3) -> list[float]:
    """Measure one forward and backward per layer in seconds, best of ``repeats``. Layers are built one at a time."""
    found = []
    for layer in layers:
        module: Any = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            module = partial(layer.forward_fn, module)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            with torch.enable_grad():
                outputs = module(_as_input(inputs))
            traced = [t for t in tensors_in(outputs) if t.requires_grad]
            wanted = list(module.parameters()) if isinstance(module, nn.Module) else []
            leaves = [p for p in wanted if p.requires_grad]
            if traced and leaves:
                torch.autograd.grad(traced, leaves, [torch.ones_like(t) for t in traced], allow_unused=True)
            times.append(time.perf_counter() - start)
        found.append(min(times))
        inputs = _as_input(outputs)
    return found


def _as_input(value: Any) -> Any:
    """Detach the tensors of a nest; floating-point ones require gradients."""
    return map_tensors(value, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))


def broadcast_durations(durations: list[float]) -> list[float]:
    """Return rank 0's durations on all ranks. Collective."""
    if dist.get_world_size() == 1:
        return durations
    message = torch.tensor(durations, dtype=torch.float64, device=get_accelerator().current_device_name())
    dist.broadcast(message, src=0)
    return message.tolist()


# Assignment of layers to stages: pure arithmetic over layer costs.


METHODS = "'uniform', 'parameters', 'type:<regex>' or 'profile'"


def partition(
    layers: Sequence[Layer],
    stages: int,
    method: str,
    weights: Sequence[float] | None = None,
) -> list[int]:
    """Return the bounds ``[0, ..., len(layers)]`` of each stage's run of layers.

    "uniform" balances the number of layers; "parameters": trained elements, or ``weights`` if given; "type:regex": the
    number of layers whose class name contains ``regex`` (ignoring case); "profile": ``weights``, durations. ValueError:
    an unknown method, a regex that matches no layer, or fewer layers than stages.
    """
    if len(layers) < stages:
        raise ValueError(f"{len(layers)} layers cannot be spread over {stages} stages: each needs one")
    kind, _, argument = method.partition(":")
    kind = kind.strip().lower()
    if kind == "uniform":
        return partition_uniform(len(layers), stages)
    if kind == "parameters":
        return partition_balanced(weights or [trained_numel(layer) for layer in layers], stages)
    if kind == "type":
        chosen = set(layers_of_type(layers, argument))
        return partition_balanced([int(number in chosen) for number in range(len(layers))], stages)
    if kind == "profile":
        if weights is None:
            raise ValueError(
                "partition_method='profile' measures the layers: pass the first layer's input for a "
                "micro-batch as PipelineModule(profile_input=...)"
            )
        return partition_balanced(weights, stages)
    raise ValueError(f"partition_method={method!r}: must be {METHODS}")


def layers_of_type(layers: Sequence[Layer], pattern: str) -> list[int]:
    """Return the indices of the layers whose class name contains the regex, ignoring case. ValueError: none does."""
    regex = re.compile(pattern, re.IGNORECASE)
    found = [number for number, layer in enumerate(layers) if regex.search(type_name(layer))]
    if not found:
        known = ", ".join(sorted({type_name(layer) for layer in layers}))
        raise ValueError(f"partition_method='type:{pattern}' matches no layer; their types are {known}")
    return found


def check_bounds(parts: Sequence[int], layers: int, runs: int) -> None:
    """Raise PipelineError unless ``parts`` are the bounds of ``runs`` runs of ``layers`` layers."""
    ordered = all(isinstance(bound, int) for bound in parts) and list(parts) == sorted(parts)
    if not ordered or len(parts) != runs + 1 or parts[0] != 0 or parts[-1] != layers:
        raise PipelineError(
            f"parts={list(parts)}: _partition_layers() must set {runs + 1} ascending numbers from 0 to {layers}, the "
            "bounds of the layers of each stage"
        )


def stage_of(bounds: Sequence[int], layer: int) -> int:
    """Return the index of the run that contains layer ``layer``. IndexError: there is no such layer."""
    for stage in range(len(bounds) - 1):
        if bounds[stage] <= layer < bounds[stage + 1]:
            return stage
    raise IndexError(f"layer {layer} is outside the {bounds[-1]} layers of the pipeline")
