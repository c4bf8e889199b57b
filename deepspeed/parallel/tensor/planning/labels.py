"""Labels of tensor elements, and the constraints on which of them must stay together.

A label is one channel that a split layer could produce (or one element of a weight). Labels that meet in one operation
are united (union-find); labels that remain separate can be computed on different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

NONE = 0
"""No label: every rank holds this element."""


class Labels:
    """Allocates and unites labels."""

    def __init__(self) -> None:
        self._count = NONE + 1
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._sharable = torch.zeros(NONE + 1, dtype=torch.bool)
        self.followers: list[Tensor] = []
        """Pairs (label, sharable label that it depends on), int64 [2, pairs]."""
        self.reasons: list[tuple[int, str]] = []
        """Reasons why labels cannot be split: (one of the labels, text)."""
        self.forbidden: list[Tensor] = []

    def fresh(self, *shape: int, sharable: Tensor | None = None) -> Tensor:
        """Return an int64 tensor of new labels. Those where ``sharable`` [shape, bool] are for elements that several
        ranks may hold: they do not unite the labels that depend on them."""
        count = prod(shape)
        made = torch.arange(self._count, self._count + count).view(shape)
        self._count += count
        flags = torch.zeros(count, dtype=torch.bool) if sharable is None else sharable.reshape(-1)
        self._sharable = torch.cat([self._sharable, flags])
        return made

    @property
    def united(self) -> int:
        """Number of unions so far, for ``components``."""
        return len(self._left)

    def unite(self, first: Tensor, second: Tensor) -> None:
        """Unite labels elementwise, with broadcasting. NONE unites with nothing."""
        first, second = torch.broadcast_tensors(first, second)
        both = (first != NONE) & (second != NONE) & (first != second)
        if both.any():
            left, right = torch.unique(torch.stack([first[both], second[both]]), dim=1)
            mixed = self._sharable[left] != self._sharable[right]
            if mixed.any():
                one, other = left[mixed], right[mixed]
                hard = torch.where(self._sharable[one], other, one)
                self.followers.append(torch.stack([hard, torch.where(self._sharable[one], one, other)]))
                left, right = left[~mixed], right[~mixed]
            self._left.append(left)
            self._right.append(right)

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Unite labels elementwise and return those of the result."""
        self.unite(first, second)
        first, second = torch.broadcast_tensors(first, second)
        take = (first == NONE) | (self._sharable[first] & (second != NONE) & ~self._sharable[second])
        return torch.where(take, second, first)

    def merged(self, labels: Tensor, dims: Sequence[int]) -> Tensor:
        """Unite all labels along ``dims`` and return those of the result, with ``dims`` of size 1."""
        if not dims or not labels.ndim:
            return labels
        one = torch.where(self._sharable[labels], NONE, labels).amax(tuple(dims), keepdim=True)
        one = torch.where(one == NONE, labels.amax(tuple(dims), keepdim=True), one)
        self.unite(labels, one)
        return one

    def any_sharable(self, labels: Tensor) -> bool:
        """Return whether any of these labels belong to elements that several ranks may hold."""
        return bool(self._sharable[labels].any())

    def forbid(self, labels: Tensor, reason: str) -> None:
        """Mark labels as impossible to split."""
        some = torch.unique(labels[labels != NONE])
        if some.numel():
            self.reasons.append((int(some[0]), reason))
            self.forbidden.append(some)

    def components(self, united: int | None = None) -> Tensor:
        """Return the smallest label of each label's component (by the first ``united`` unions), int64 [labels]."""
        root = torch.arange(self._count)
        if not self._left[:united]:
            return root
        left, right = torch.cat(self._left[:united]), torch.cat(self._right[:united])
        while True:
            low = torch.minimum(root[left], root[right])
            new = root.clone()
            new.scatter_reduce_(0, root[left], low, "amin")
            new.scatter_reduce_(0, root[right], low, "amin")
            new = new[new]
            if torch.equal(new, root):
                return root
            root = new


def varies(ids: Tensor, dim: int) -> bool:
    """Return whether ``ids`` differ along ``dim``."""
    return ids.shape[dim] > 1 and bool((ids != ids.narrow(dim, 0, 1)).any())
