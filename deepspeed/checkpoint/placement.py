"""Placement of a rank's tensor in a global one. Tensor-, expert- and pipeline-parallel layers attach it to
parameters; the gradient norm, the first broadcast, checkpoints and exports need to know nothing else about them.

Pure arithmetic, without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.shards import Box, ShardIndex

ATTRIBUTE = "ds_placement"
"""Attribute of a parameter's placement; without it, the parameter is whole on every rank."""

EXPERTS = "ep"
"""Axis over which ranks with the same dense weights hold different experts, stacked under one name."""
NUMBERED_EXPERTS = "numbered experts"
"""The same for experts with separate names (``checkpoint/numbered.py``)."""
_NUMBERED = "ds_numbered_expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One rank's tensor as part of a tensor of ``global_shape``.

    ``boxes`` are the boxes of the global tensor that it holds, concatenated in this order along the one dim in which
    they differ; ``()``: all of it. ``split``: mesh axes over which the global tensor is split. ``replicated``: axes
    over which ranks hold equal copies, other than those over which gradients are summed. ``counts``: whether this
    copy is counted where each weight counts once (the gradient norm). ``elsewhere``: boxes that this rank holds too,
    but another rank counts.
    """

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...] = ()
    split: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    counts: bool = True
    elsewhere: tuple[Box, ...] = ()

    def index(self, name: str, start: int = 0, stop: int | None = None) -> ShardIndex:
        """Return the index of elements ``[start, stop)`` of the rank's flat tensor; by default of all."""
        if stop is None:
            stop = ShardIndex(name, self.global_shape, self.boxes, 0, 0).local_numel
        return ShardIndex(name, self.global_shape, self.boxes, start, stop)

    def stacked(self, place: int, places: int, axis: str) -> Placement:
        """Return the placement as row ``place`` of ``places`` different tensors of one name, stacked along a new
        first dim."""
        row = (place, place + 1)
        boxes = self.boxes or (tuple((0, size) for size in self.global_shape),)
        return replace(
            self,
            global_shape=(places, *self.global_shape),
            boxes=tuple((row, *box) for box in boxes),
            split=(*self.split, axis),
        )


def interval(
    shape: Sequence[int], dim: int, sizes: Sequence[int], place: int, *, axis: str = "tp", stride: int = 1
) -> Placement:
    """Return the placement of a tensor split along ``dim``: ``sizes``: extents on all ranks; ``place``: this rank's
    position.

    ``stride`` as in Megatron-LM: the tensor consists of that many matrices side by side (such as the two of a gated
    unit), each of which is split over all ranks.
    """
    dim = dim % len(shape)
    if sizes[place] != shape[dim] or any(size % stride for size in sizes):
        raise ValueError(
            f"extents {list(sizes)} along dim {dim} in {stride} parts do not fit a tensor of shape {tuple(shape)} at "
            f"position {place}"
        )
    parts = [size // stride for size in sizes]
    total = tuple(sum(sizes) if d == dim else size for d, size in enumerate(shape))
    return side_by_side(total, dim, [parts] * stride, place, axis=axis)


def side_by_side(
    whole: Sequence[int], dim: int, matrices: Sequence[Sequence[int]], place: int, *, axis: str = "tp"
) -> Placement:
    """Return the placement of one rank's parts of several matrices side by side along ``dim``, each split over all
    ranks. ``matrices``: the extents on all ranks of each; ``place``: this rank's position."""
    boxes: list[Box] = []
    begin = 0
    for extents in matrices:
        low = begin + sum(extents[:place])
        side = (low, low + extents[place])
        boxes.append(tuple(side if d == dim else (0, size) for d, size in enumerate(whole)))
        begin += sum(extents)
    return Placement(global_shape=tuple(whole), boxes=tuple(boxes), split=(axis,))


def placement_of(param: Any) -> Placement:
    """Return the placement of a parameter; that of a whole tensor if it has none."""
    found = getattr(param, ATTRIBUTE, None)
    return found if found is not None else Placement(global_shape=_full_shape(param))


def kinds_of_experts(params: Iterable[Tensor]) -> frozenset[str]:
    """Return the kinds (``EXPERTS``, ``NUMBERED_EXPERTS``) among ``params``: ranks with the same dense weights hold
    different experts."""
    split = {axis for param in params for axis in placement_of(param).split}
    return frozenset(split & {EXPERTS, NUMBERED_EXPERTS})


def place(param: Any, placement: Placement) -> None:
    """Attach ``placement`` to a parameter. ValueError: it has another number of elements."""
    own, expected = prod(_full_shape(param)), placement.index("").numel
    if own != expected:
        raise ValueError(f"a parameter of {own} elements cannot fill {placement.boxes}, {expected} elements")
    setattr(param, ATTRIBUTE, placement)


def number_experts(params: Iterable[Any]) -> None:
    """Mark the parameters of separately named experts, which are distributed over ranks."""
    for param in params:
        setattr(param, _NUMBERED, True)


def is_numbered_expert(param: Any) -> bool:
    return bool(getattr(param, _NUMBERED, False))


def local_part(param: Any, value: Tensor) -> Tensor:
    """Return the local part of ``value`` if it has the global shape; any other shape is returned unchanged."""
    placement, shape = placement_of(param), _full_shape(param)
    if not placement.boxes or tuple(value.shape) != placement.global_shape or tuple(value.shape) == shape:
        return value
    parts = [value[tuple(slice(low, high) for low, high in box)] for box in placement.boxes]
    if len(parts) == 1:
        return parts[0].reshape(shape)
    sides = zip(*placement.boxes, strict=True)
    dim = next(number for number, same in enumerate(sides) if len(set(same)) > 1)
    return torch.cat(parts, dim).reshape(shape)


def _full_shape(param: Any) -> tuple[int, ...]:
    """Return the unsharded shape, also of a partitioned parameter (stage 3)."""
    return tuple(getattr(param, "ds_shape", param.shape))
