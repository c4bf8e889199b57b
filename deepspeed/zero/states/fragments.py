"""Fragments of parameters that a rank owns, and the lists and sub-groups in which the step processes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.layout import Fragment


@dataclass(slots=True)
class OwnedFragment:
    """One fragment with the tensors that the optimizer step touches.

    The optimizer updates ``master``: [numel] in the master dtype, or the parameter itself if nothing is partitioned
    and there is no separate master. ``low`` is the fragment of the model's own weights that is refreshed from it, or
    None if they are the same memory.
    """

    param_index: int
    group_index: int
    fragment: Fragment
    grad_bucket: GradBucket
    master: Tensor
    low: Tensor | None

    def gradient(self) -> Tensor:
        """Return a view of the reduced gradient, shaped like ``master``."""
        reduced = self.grad_bucket.reduced
        assert reduced is not None, "the gradient has not been reduced"
        start = self.fragment.shard_offset
        return reduced[start : start + self.fragment.numel].view(self.master.shape)


class GroupTensors(NamedTuple):
    """The tensors of one optimizer group on this rank, in parallel lists."""

    fragments: list[OwnedFragment]
    masters: list[Tensor]
    grads: list[Tensor]
    lows: list[Tensor | None]

    @classmethod
    def of(cls, fragments: list[OwnedFragment]) -> GroupTensors:
        return cls(
            fragments,
            [o.master for o in fragments],
            [o.gradient() for o in fragments],
            [o.low for o in fragments],
        )

    @property
    def starts(self) -> list[int]:
        return [owned.fragment.param_offset for owned in self.fragments]

    def pick(self, indices: Iterable[int]) -> GroupTensors:
        chosen = list(indices)
        fragments, masters, grads, lows = ([column[i] for i in chosen] for column in self)
        return GroupTensors(fragments, masters, grads, lows)  # type: ignore[arg-type]


class FragmentLike(Protocol):
    """A fragment with the index of its parameter."""

    @property
    def param_index(self) -> int: ...

    @property
    def fragment(self) -> Fragment: ...


FragmentT = TypeVar("FragmentT", bound=FragmentLike)


def sub_groups(groups: Sequence[Sequence[FragmentT]], size: int) -> Iterator[list[list[FragmentT]]]:
    """Yield sub-groups of consecutive fragments, by group, up to ``size`` elements each; ordered like the model, not
    like the groups."""
    number_of = {id(owned): g for g, group in enumerate(groups) for owned in group}
    everything = sorted(
        (o for group in groups for o in group), key=lambda o: (o.param_index, o.fragment.param_offset)
    )
    current: list[list[FragmentT]] = [[] for _ in groups]
    held = 0
    for owned in everything:
        if held and held + owned.fragment.numel > size:
            yield current
            current, held = [[] for _ in groups], 0
        current[number_of[id(owned)]].append(owned)
        held += owned.fragment.numel
    if held:
        yield current


def write_pieces(pieces: Sequence[Tensor] | None, value: Tensor, what: str) -> None:
    """Write ``value`` over the pieces that make up this rank's part. ValueError: ``pieces`` is None (they do not
    exist now), or the sizes differ."""
    if pieces is None:
        raise ValueError(f"This rank has no {what} to write; gradients exist from backward() to step().")
    numels = [piece.numel() for piece in pieces]
    if value.numel() != sum(numels):
        raise ValueError(f"This rank's {what} has {sum(numels)} elements, but the value has {value.numel()}.")
    with torch.no_grad():
        for piece, part in zip(pieces, value.detach().reshape(-1).split(numels), strict=True):
            piece.copy_(part.view(piece.shape))
