"""Tensor-parallel cuts of parameters, for checkpoints that do not record boxes (release 0.19).

Two sources: the saving model's description (``universal_checkpoint_info``: regular expressions for names), and the
placements of the loading model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepspeed.checkpoint import constants
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.placement import Placement, interval, placement_of, side_by_side

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedParts:
    """The parts that the loading model wants: placements under all names of a parameter, and the number of matrices
    side by side that are split separately (Megatron's ``partition_stride``). ``rank``, ``ranks``: this rank's
    tensor-parallel rank and their number."""

    placements: Mapping[str, Placement] = field(default_factory=dict)
    strides: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    ranks: int = 1

    @classmethod
    def by(cls, module: nn.Module, rank: int, ranks: int) -> WantedParts:
        params = dict(module.named_parameters(remove_duplicate=False))
        return cls(
            placements={name: placement_of(param) for name, param in params.items()},
            strides={name: int(getattr(param, "partition_stride", 1) or 1) for name, param in params.items()},
            rank=rank,
            ranks=ranks,
        )


@dataclass(frozen=True, slots=True)
class DescribedCuts:
    """Cuts described by the entries of ``universal_checkpoint_info``. A parameter without a match is split along its
    first dim."""

    info: Mapping[str, Any]

    def matches(self, key: str, name: str) -> bool:
        return any(re.match(pattern, name) for pattern in self.info.get(key) or ())

    def is_copy(self, name: str) -> bool:
        """Return whether every rank has the whole tensor; averaged parameters count as copies."""
        keys = (constants.TP_REPLICATED_PARAMETER_PATTERNS, constants.PARAMETER_TO_AVERAGE_PATTERNS)
        return any(self.matches(key, name) for key in keys)

    def placements(self, name: str, shapes: Sequence[Shape]) -> list[Placement]:
        """Return the placement on each rank, from the tensor's shape on each rank."""
        if self.is_copy(name):
            return [Placement(global_shape=shapes[0]) for _ in shapes]
        for entry in self.info.get(constants.PARAMETER_WITH_SUB_PARAMS) or ():
            if any(re.match(pattern, name) for pattern in entry["patterns"]):
                dim = int(entry["partition_dim"])
                extents = entry["shape"][dim]
                if isinstance(extents, (tuple, list)):
                    return _split(name, shapes, dim, [int(e) for e in extents])
                return _strided(name, shapes, dim, _count(entry["shape"], dim))
        if self.matches(constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, name):
            return _strided(name, shapes, 0, 2)
        row = self.matches(constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, name) and len(shapes[0]) > 1
        return _strided(name, shapes, 1 if row else 0, 1)


def split_placements(
    name: str, shapes: Sequence[Shape], info: Mapping[str, Any] | None, wanted: WantedParts | None
) -> Sequence[Placement | None]:
    """Return the placement of each rank's tensor ``name`` (``shapes``: by rank); None where it is unknown and not
    needed.

    CheckpointError: neither the checkpoint nor the loading model describes the cut.
    """
    known = wanted.placements.get(name) if wanted is not None else None
    if info and any(info.get(key) for key in _RULES):
        return DescribedCuts(info).placements(name, shapes)
    if info and wanted is None and shapes[0] and any(key in info for key in _RULES):
        # Empty rules would mean that all parameters are split along their first dim. A loading model is a better
        # source: some systems write empty rules without meaning them.
        return DescribedCuts(info).placements(name, shapes)
    if known is None or wanted is None:
        if len(set(shapes)) == 1 and (wanted is not None or not shapes[0]):
            # A buffer; parameters are listed above.
            return [Placement(global_shape=shapes[0]) for _ in shapes]
        raise CheckpointError(
            f"the checkpoint has {len(shapes)} parts of {name}, but not how to join them. Load it into an "
            "engine whose model marks its parameters (tensor_model_parallel, partition_dim, "
            "partition_stride), and save it again"
        )
    return _like(name, shapes, known, wanted)


_RULES = (
    constants.TP_REPLICATED_PARAMETER_PATTERNS,
    constants.PARAMETER_TO_AVERAGE_PATTERNS,
    constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    constants.PARAMETER_WITH_SUB_PARAMS,
    constants.VOCABULARY_PARAMETER_PATTERNS,
)


def _like(
    name: str, shapes: Sequence[Shape], known: Placement, wanted: WantedParts
) -> Sequence[Placement | None]:
    """Return placements from the loading model's global shape: parts add up to it along exactly one dim."""
    whole = known.global_shape
    if all(shape == whole for shape in shapes):
        return [Placement(global_shape=whole) for _ in shapes]
    fused = len(known.boxes) > 1 and wanted.strides.get(name, 1) == 1
    if fused and wanted.ranks == len(shapes) and known.index(name).local_shape == shapes[wanted.rank]:
        # This rank needs no other part.
        return [known if number == wanted.rank else None for number in range(len(shapes))]
    dims = [
        dim
        for dim in range(len(whole))
        if sum(shape[dim] for shape in shapes) == whole[dim]
        and all(s[:dim] + s[dim + 1 :] == whole[:dim] + whole[dim + 1 :] for s in shapes)
    ]
    if len(dims) != 1:
        raise CheckpointError(
            f"the checkpoint's parts of {name}, {', '.join(map(str, shapes))}, do not form the model's "
            f"{whole} along any single dim"
        )
    return _strided(name, shapes, dims[0], wanted.strides.get(name, 1))


def _strided(name: str, shapes: Sequence[Shape], dim: int, stride: int) -> list[Placement]:
    sizes = [shape[dim] for shape in shapes]
    try:
        return [interval(shape, dim, sizes, rank, stride=stride) for rank, shape in enumerate(shapes)]
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _count(shape: Sequence[Any], dim: int) -> int:
    """Return the number of equal matrices side by side: parallel layers give it, with -1 for the other dim, as in (3,
    -1); Megatron's models give the extent instead, and are split as one matrix."""
    return int(shape[dim]) if -1 in shape and shape[dim] > 0 else 1


def _split(name: str, shapes: Sequence[Shape], dim: int, sections: list[int]) -> list[Placement]:
    """Split each of several matrices side by side evenly; ``sections``: their extents along ``dim``."""
    count = len(shapes)
    if any(size % count for size in sections) or sum(sections) != sum(shape[dim] for shape in shapes):
        raise CheckpointError(
            f"{name}: extents {sections} along dim {dim} do not fit {count} parts, {shapes[0]}"
        )
    whole = tuple(sum(sections) if d == dim else size for d, size in enumerate(shapes[0]))
    matrices = [[size // count] * count for size in sections]
    return [side_by_side(whole, dim, matrices, rank) for rank in range(count)]
