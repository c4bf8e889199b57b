"""Assignment of layers to stages: pure arithmetic over weights of layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepspeed.ops.partitions import partition_balanced, partition_uniform
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.specs import Layer, trained_numel, type_name

METHODS = "'uniform', 'parameters', 'type:<regex>' or 'profile'"


def partition(
    layers: Sequence[Layer],
    stages: int,
    method: str,
    durations: Sequence[float] | None = None,
    counts: Sequence[int] | None = None,
) -> list[int]:
    """Bounds ``[0, ..., len(layers)]`` of the runs of layers of each stage.

    "uniform": equally many layers; "parameters": equally many trained elements, or those that ``counts`` has;
    "type:regex": equally many layers whose class has a name in which ``regex`` occurs (any case); "profile": equal
    ``durations``. ValueError: another method, a regex that matches no layer, or fewer layers than stages.
    """
    if len(layers) < stages:
        raise ValueError(f"{len(layers)} layers cannot be spread over {stages} stages: each needs one")
    kind, _, argument = method.partition(":")
    kind = kind.strip().lower()
    if kind == "uniform":
        return partition_uniform(len(layers), stages)
    if kind == "parameters":
        return partition_balanced(counts or [trained_numel(layer) for layer in layers], stages)
    if kind == "type":
        chosen = set(layers_of_type(layers, argument))
        return partition_balanced([int(number in chosen) for number in range(len(layers))], stages)
    if kind == "profile":
        if durations is None:
            raise ValueError(
                "partition_method='profile' measures the layers: give PipelineModule(profile_input=...) what the first "
                "layer gets for a micro-batch"
            )
        return partition_balanced(durations, stages)
    raise ValueError(f"partition_method={method!r}: must be {METHODS}")


def layers_of_type(layers: Sequence[Layer], pattern: str) -> list[int]:
    """The numbers of the layers in whose class's name the regex occurs, in any case. ValueError: there is none."""
    regex = re.compile(pattern, re.IGNORECASE)
    found = [number for number, layer in enumerate(layers) if regex.search(type_name(layer))]
    if not found:
        known = ", ".join(sorted({type_name(layer) for layer in layers}))
        raise ValueError(f"partition_method='type:{pattern}' matches no layer; their types are {known}")
    return found


def check_bounds(parts: Sequence[int], layers: int, runs: int) -> None:
    """PipelineError: ``parts`` are not the bounds of ``runs`` runs of ``layers`` layers."""
    ordered = all(isinstance(bound, int) for bound in parts) and list(parts) == sorted(parts)
    if not ordered or len(parts) != runs + 1 or parts[0] != 0 or parts[-1] != layers:
        raise PipelineError(
            f"parts={list(parts)}: _partition_layers() must set {runs + 1} ascending numbers from 0 to {layers}, the "
            "bounds of the layers of each stage"
        )


def stage_of(bounds: Sequence[int], layer: int) -> int:
    """The stage of layer number ``layer``. IndexError: there is no such layer."""
    for stage in range(len(bounds) - 1):
        if bounds[stage] <= layer < bounds[stage + 1]:
            return stage
    raise IndexError(f"layer {layer} is outside the {bounds[-1]} layers of the pipeline")
