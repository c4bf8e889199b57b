"""The files of a checkpoint of release 0.19, and the placement of its tensor-parallel ranks' parts in whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.constants import (
    CHECKPOINT_PARALLEL_DIMS,
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.checkpoint.errors import CheckpointNotFoundError
from deepspeed.checkpoint.foreign.splits import Shape, WantedParts, split_placements
from deepspeed.checkpoint.names import has_sharded_weights, model_ranks, optim_ranks
from deepspeed.checkpoint.placement import Placement
from deepspeed.checkpoint.save_ids import FileOfSave, check_save_of, save_of
from deepspeed.checkpoint.shards import ShardIndex

Order = Sequence[Sequence[str]]
"""Parameter names by optimizer group, in the optimizer's order."""


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


@dataclass(frozen=True, slots=True)
class UpstreamFolder:
    """A checkpoint's files, and what its loader knows.

    ``first``: content of the first of the ``models`` files. ``optims`` is empty if only weights are wanted; ``order``
    is needed for the optimizer state of stage 0, ``wanted`` for tensor-parallel parts whose cut the checkpoint does
    not describe. ``read_file`` returns the whole content of a file.
    """

    path: Path
    models: Sequence[Path]
    optims: Sequence[Path]
    first: dict[str, Any]
    read_file: Callable[[Path], dict[str, Any]]
    order: Order | None
    wanted: WantedParts | None

    @property
    def first_file(self) -> FileOfSave:
        return FileOfSave(self.models[0], save_of(self.first))

    @property
    def stages(self) -> int:
        """Number of pipeline stages that the first model file records."""
        return int((self.first.get(CHECKPOINT_PARALLEL_DIMS) or {}).get(CHECKPOINT_PP_DEGREE) or 1)

    @property
    def ranks(self) -> int:
        """Number of tensor-parallel ranks that the first model file records."""
        recorded = (self.first.get(CHECKPOINT_PARALLEL_DIMS) or {}).get(CHECKPOINT_TP_DEGREE)
        return int(recorded or int(self.first.get("mp_world_size") or 1) // self.stages)

    def read(self, path: Path) -> dict[str, Any]:
        """Return the whole content of a file. CheckpointError: it is of another save than the first model file."""
        if path == self.models[0]:
            return self.first
        content = self.read_file(path)
        check_save_of(path, content, self.first_file)
        return content

    def optims_of(self, rank: int) -> list[Path]:
        """Return the optimizer files of one model-parallel rank."""
        return [path for path in self.optims if (optim_ranks(path.name) or (0, 0))[1] == rank]

    def models_of_ranks(self, *, sharded: bool) -> list[dict[Path, dict[str, Any]]]:
        """Return the model files of each tensor-parallel rank with their contents; ``sharded``: those of stage 3.
        CheckpointNotFoundError: a rank has none."""
        paths = [path for path in self.models if has_sharded_weights(path.name) == sharded]
        by_rank = [
            [path for path in paths if (model_ranks(path.name) or (0, 0))[1] == rank]
            for rank in range(self.ranks)
        ]
        missing = [rank for rank, files in enumerate(by_rank) if not files]
        if missing:
            raise CheckpointNotFoundError(
                f"{self.path} lacks the model file of tensor-parallel rank {missing[0]} ({len(missing)} of "
                f"{self.ranks} are missing)"
            )
        return [{path: self.read(path) for path in files} for files in by_rank]

    def split_parts(self, elsewhere: Collection[str] = ()) -> list[UpstreamPart]:
        """Return the part of each tensor-parallel rank, without the names ``elsewhere``; all names if there is one
        rank."""
        if self.ranks == 1:
            return [UpstreamPart(self.models[0], self.first, {})]
        left_out = {*(self.first.get("buffer_names") or ()), *elsewhere}
        files = self.models_of_ranks(sharded=False)
        shapes = [
            {
                name: tuple(value.shape)
                for name, value in content["module"].items()
                if isinstance(value, Tensor) and name not in left_out
            }
            for contents in files
            for content in contents.values()
        ]
        return self.placed_parts(files, shapes)

    def placed_parts(
        self, files: Sequence[Mapping[Path, Mapping[str, Any]]], shapes: Sequence[Mapping[str, Shape]]
    ) -> list[UpstreamPart]:
        """Return the first of each rank's ``files`` with its placements. ``shapes``: of its weights' parts."""
        info, wanted = self.first.get(UNIVERSAL_CHECKPOINT_INFO), self.wanted
        placed = {
            name: split_placements(name, [of_rank[name] for of_rank in shapes], info, wanted)
            for name in shapes[0]
        }
        preferred = wanted.rank if wanted is not None and wanted.ranks == len(files) else 0
        return [
            UpstreamPart(
                *next(iter(contents.items())),
                {name: of[rank] for name, of in placed.items()},
                rank == preferred,
            )
            for rank, contents in enumerate(files)
        ]
