"""Reads the placement of a DTensor. A module of its own: importing torch's DTensors takes most of a second."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor, Replicate, Shard

from deepspeed.checkpoint.placement import Placement


def placement_of_dtensor(tensor: DTensor, axes: Sequence[str] | None = None) -> Placement:
    """Where the local part of a DTensor lies. ``axes``: our names of the dims of its mesh, by default their own.

    Dims of the mesh split one after the other, each what the ones before it left, into chunks as ``torch.chunk`` makes
    them. ValueError: a placement that is neither ``Shard`` nor ``Replicate`` (partial sums, strided shards).
    """
    mesh = tensor.device_mesh
    names = tuple(axes or mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.ndim)))
    place_of, shape = mesh.get_coordinate(), tuple(tensor.shape)
    if place_of is None:
        raise ValueError("this rank is not in the device mesh of the tensor")
    box = [(0, size) for size in shape]
    split: list[str] = []
    replicated: list[str] = []
    for number, how in enumerate(tensor.placements):
        if isinstance(how, Replicate):
            replicated.append(names[number])
        elif type(how) is Shard:
            split.append(names[number])
            dim = how.dim % len(shape)
            box[dim] = _chunk(box[dim], mesh.size(number), place_of[number])
        else:
            raise ValueError(
                f"a parameter cannot be {how} over the axis {names[number]!r} of its device mesh"
            )
    first = all(place_of[names.index(name)] == 0 for name in replicated)
    boxes = (tuple(box),) if split else ()
    return Placement(
        global_shape=shape, boxes=boxes, split=tuple(split), replicated=tuple(replicated), counts=first
    )


def _chunk(interval: tuple[int, int], parts: int, number: int) -> tuple[int, int]:
    low, high = interval
    step = -(-(high - low) // parts)
    return min(low + number * step, high), min(low + (number + 1) * step, high)
