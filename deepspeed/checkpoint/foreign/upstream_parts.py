"""Model files of tensor-parallel ranks in checkpoints of release 0.19: placement of their parts in whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.catalog import Catalog
from deepspeed.checkpoint.constants import (
    CHECKPOINT_PARALLEL_DIMS,
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.checkpoint.errors import CheckpointNotFoundError
from deepspeed.checkpoint.foreign.splits import Shape, WantedParts, split_placements
from deepspeed.checkpoint.names import has_sharded_weights, model_ranks
from deepspeed.checkpoint.placement import Placement
from deepspeed.checkpoint.shards import ShardIndex

Read = Callable[[Path], dict[str, Any]]
"""Reads the whole content of a file."""


@dataclass(frozen=True, slots=True)
class UpstreamPart:
    """One tensor-parallel rank's model file, and the placements of its tensors. ``first``: replicated tensors are
    read from this rank."""

    path: Path
    content: Mapping[str, Any]
    placements: Mapping[str, Placement | None]
    first: bool = True

    def index(self, name: str, shape: Shape, start: int = 0, stop: int | None = None) -> ShardIndex | None:
        """Return the index of elements ``[start, stop)`` of this rank's tensor ``name``; None: another rank's copy is
        read."""
        stop = prod(shape) if stop is None else stop
        if name not in self.placements:
            return ShardIndex(name, shape, (), start, stop) if self.first else None
        placement = self.placements[name]
        if placement is None or not (placement.boxes or self.first):
            return None
        return placement.index(name, start, stop)


def split_parts(
    catalog: Catalog,
    models: list[Path],
    first: dict[str, Any],
    read: Read,
    wanted: WantedParts | None,
    elsewhere: Collection[str] = (),
) -> list[UpstreamPart]:
    """Read the part of each tensor-parallel rank, without the names ``elsewhere``; all names if there is one rank."""
    _, ranks = parallel_sizes(first)
    if ranks == 1:
        return [UpstreamPart(models[0], first, {})]
    by_rank = {
        (model_ranks(path.name) or (0, 0))[1]: path for path in models if not has_sharded_weights(path.name)
    }
    check_all_parts(catalog, by_rank, ranks)
    contents = {
        by_rank[rank]: first if by_rank[rank] == models[0] else read(by_rank[rank]) for rank in range(ranks)
    }
    left_out = {*(first.get("buffer_names") or ()), *elsewhere}
    shapes = [
        {
            name: tuple(value.shape)
            for name, value in content["module"].items()
            if isinstance(value, Tensor) and name not in left_out
        }
        for content in contents.values()
    ]
    return placed_parts(contents, shapes, first, wanted)


def parallel_sizes(first: Mapping[str, Any]) -> tuple[int, int]:
    """Return the pipeline size and the tensor-parallel size that a model file records."""
    parallel = first.get(CHECKPOINT_PARALLEL_DIMS) or {}
    stages = int(parallel.get(CHECKPOINT_PP_DEGREE) or 1)
    return stages, int(parallel.get(CHECKPOINT_TP_DEGREE) or int(first.get("mp_world_size") or 1) // stages)


def check_all_parts(catalog: Catalog, by_rank: Container[int], ranks: int) -> None:
    missing = [rank for rank in range(ranks) if rank not in by_rank]
    if missing:
        raise CheckpointNotFoundError(
            f"{catalog.folder} lacks the model file of tensor-parallel rank {missing[0]} ({len(missing)} of {ranks} "
            "are missing)"
        )


def placed_parts(
    contents: Mapping[Path, Mapping[str, Any]],
    shapes: Sequence[Mapping[str, Shape]],
    first: Mapping[str, Any],
    wanted: WantedParts | None,
) -> list[UpstreamPart]:
    """Return the parts with their placements. ``contents``: one file per tensor-parallel rank; ``shapes``: of its
    weights' parts, by name."""
    info = first.get(UNIVERSAL_CHECKPOINT_INFO)
    placed = {
        name: split_placements(name, [of_rank[name] for of_rank in shapes], info, wanted)
        for name in shapes[0]
    }
    same = wanted is not None and wanted.ranks == len(contents)
    preferred = wanted.rank if wanted is not None and same else 0
    return [
        UpstreamPart(path, content, {name: of[rank] for name, of in placed.items()}, rank == preferred)
        for rank, (path, content) in enumerate(contents.items())
    ]
