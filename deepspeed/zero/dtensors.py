"""Reads the placement of a DTensor. A module of its own: importing torch's DTensors takes most of a second."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as Layout
from torch.distributed.tensor.placement_types import _StridedShard

from deepspeed.checkpoint.placement import Placement
from deepspeed.checkpoint.shards import Box

Interval = tuple[int, int]


def placement_of_dtensor(tensor: DTensor, axes: Sequence[str] | None = None) -> Placement:
    """Return the placement of the local part of a DTensor. ``axes``: our names of the dims of its mesh, by default
    their own.

    Dims of the mesh split one after the other, each what the ones before it left, into chunks as ``torch.chunk`` makes
    them. ValueError: a placement that is neither ``Shard`` nor ``Replicate`` (partial sums), or a strided shard (the
    matrices of a fused projection, each of which is split) together with another one of the same dim.
    """
    mesh = tensor.device_mesh
    names = tuple(axes or mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.ndim)))
    place_of, shape = mesh.get_coordinate(), tuple(tensor.shape)
    if place_of is None:
        raise ValueError("this rank is not in the device mesh of the tensor")
    held: list[list[Interval]] = [[(0, size)] for size in shape]
    split: list[str] = []
    replicated: list[str] = []
    for number, how in enumerate(tensor.placements):
        if isinstance(how, Replicate):
            replicated.append(names[number])
            continue
        dim = _dim(how, len(shape))
        if dim is None or len(held[dim]) > 1 or (_factor(how) > 1 and held[dim] != [(0, shape[dim])]):
            raise ValueError(
                f"a parameter cannot be {how} over the axis {names[number]!r} of its device mesh"
            )
        split.append(names[number])
        parts = [_chunk(held[dim][0], _factor(how), part) for part in range(_factor(how))]
        held[dim] = [_chunk(part, mesh.size(number), place_of[number]) for part in parts]
    return Placement(
        global_shape=shape,
        boxes=_boxes(held) if split else (),
        split=tuple(split),
        replicated=tuple(replicated),
        counts=all(place_of[names.index(name)] == 0 for name in replicated),
    )


def _dim(how: Layout, ndim: int) -> int | None:
    """The dim that it splits; None if it splits none."""
    return how.dim % ndim if isinstance(how, (Shard, _StridedShard)) else None


def _factor(how: Layout) -> int:
    """Return how many matrices lie side by side."""
    return int(how.split_factor) if isinstance(how, _StridedShard) else 1


def _boxes(held: Sequence[Sequence[Interval]]) -> tuple[Box, ...]:
    """At most one dim has several intervals."""
    count = max(map(len, held), default=1)
    return tuple(tuple(sides[min(number, len(sides) - 1)] for sides in held) for number in range(count))


def _chunk(interval: Interval, parts: int, number: int) -> Interval:
    low, high = interval
    step = -(-(high - low) // parts)
    return min(low + number * step, high), min(low + (number + 1) * step, high)
