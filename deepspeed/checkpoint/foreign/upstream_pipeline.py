"""Checkpoints of pipelines as release 0.19 writes them.

    layer_03-model_states.pt                              weights of a layer, by its number in the whole pipeline
    mp_rank_01_model_states.pt                            the rest of the second stage's model states
    bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt        a partition of the second stage's optimizer

Modules that layers share are ``tied_modules.KEY`` in the model. Each stage that uses one saves its state; for a layer
with its own forward function no file holds the weights, only their fp32 masters exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.foreign.splits import Shape
from deepspeed.checkpoint.foreign.upstream_parts import UpstreamFolder
from deepspeed.checkpoint.names import model_file

_LAYER = re.compile(r"layer_(\d+)-model_states\.pt")
SLICES = "param_slice_mappings"
"""Key of the slices of parameters in a partition, by optimizer group and name."""
_TIED = re.compile(r"(tied_modules\.[^.]+)\.(.+)")


def stage_contents(source: UpstreamFolder) -> dict[Path, dict[str, Any]]:
    """Return the model files of all stages, in their order. CheckpointError: one is missing, or tensor-parallel ranks
    shared the layers."""
    if source.ranks > 1:
        raise CheckpointError(
            f"{source.path} was written by {source.stages} pipeline stages of {source.ranks} tensor-parallel ranks "
            "each; such checkpoints of release 0.19 cannot be read: convert it with that release's ds_to_universal, "
            "and load the result with checkpoint.load_universal"
        )
    paths = [source.path / model_file(stage) for stage in range(source.stages)]
    for stage, path in enumerate(paths):
        if not path.is_file():
            raise CheckpointNotFoundError(
                f"{path} is missing, the model file of pipeline stage {stage} of {source.stages}"
            )
    return {path: source.read(path) for path in paths}


def stage_shapes(
    path: Path, content: Mapping[str, Any], states: Sequence[Mapping[str, Any]], known: Mapping[str, Shape]
) -> list[dict[str, Shape]]:
    """Return a stage's trained shapes, by optimizer group. ``states``: the partitions of its optimizer, the only
    place with names if bf16 ran without ZeRO; ``known``: shapes by name, from other files. CheckpointError: no file
    has the names."""
    if content.get("param_shapes") is not None:
        return [{name: tuple(shape) for name, shape in group.items()} for group in content["param_shapes"]]
    if not states or any(SLICES not in state for state in states):
        raise CheckpointError(
            f"{path} holds the optimizer state of a pipeline stage by index only (ZeRO stage 0): load the "
            "weights with load_module_only=True, or save it again with ZeRO stage 1"
        )
    found: list[dict[str, Shape]] = []
    for number in range(len(states[0][SLICES])):
        sizes: dict[str, int] = {}
        for state in states:
            for name, slice_ in state[SLICES][number].items():
                sizes[name] = sizes.get(name, 0) + int(slice_.numel)
        found.append(
            {name: known[name] if prod(known.get(name, ())) == n else (n,) for name, n in sizes.items()}
        )
    return found


def layer_files(source: UpstreamFolder) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Return the number of each layer that has a file, and the file's content, by path."""
    paths = sorted(source.path.iterdir())
    numbered = {path: match for path in paths if (match := _LAYER.fullmatch(path.name))}
    return {path: (str(int(match[1])), source.read(path)) for path, match in numbered.items()}


def layer_weights(number: str, content: Mapping[str, Any], trained: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the weights and buffers of a layer by their names in the whole model. ``trained``: shapes of parameters;
    a layer that has none under its own number is a tied module."""
    prefix = number
    if not any(f"{number}.{key}" in trained for key in content):
        own = {key: tuple(value.shape) for key, value in content.items() if isinstance(value, Tensor)}
        prefix = next((module for module, held in _tied(trained).items() if held == own), number)
    return {f"{prefix}.{key}": value for key, value in content.items()}


def _tied(shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Return the parameters of each tied module by their names within it."""
    found: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if match := _TIED.fullmatch(name):
            found.setdefault(match[1], {})[match[2]] = shape
    return found
