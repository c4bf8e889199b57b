"""Labels of tensor elements, and which of them have to stay together.

A label stands for one channel that a split layer could produce (or one element of a weight). Elements that one
operation brings together are united; what is left apart in the end can be computed on different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NONE = 0
"""No label: every rank has this element."""


class Labels:
    """Hands out labels, and unites them."""

    def __init__(self) -> None:
        self._count = NONE + 1
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._soft = torch.zeros(NONE + 1, dtype=torch.bool)
        self.followers: list[Tensor] = []
        """Pairs (label, soft label that it needs), int64 [2, pairs]."""
        self.reasons: list[tuple[int, str]] = []
        """Why labels cannot be split: (one of them, text)."""
        self.stuck: list[Tensor] = []

    def fresh(self, *shape: int, soft: Tensor | None = None) -> Tensor:
        """int64 tensor of labels that nobody has. Those where ``soft`` [shape, bool] are of what several ranks may
        have: they do not unite what needs them."""
        count = 1
        for size in shape:
            count *= size
        made = torch.arange(self._count, self._count + count).view(shape)
        self._count += count
        flags = torch.zeros(count, dtype=torch.bool) if soft is None else soft.reshape(-1)
        self._soft = torch.cat([self._soft, flags])
        return made

    @property
    def united(self) -> int:
        """Return how often labels were united so far: for ``components``."""
        return len(self._left)

    def unite(self, first: Tensor, second: Tensor) -> None:
        """Elementwise, tensors of shapes that broadcast. NONE unites with nothing."""
        first, second = torch.broadcast_tensors(first, second)
        both = (first != NONE) & (second != NONE) & (first != second)
        if both.any():
            left, right = torch.unique(torch.stack([first[both], second[both]]), dim=1)
            mixed = self._soft[left] != self._soft[right]
            if mixed.any():
                one, other = left[mixed], right[mixed]
                hard = torch.where(self._soft[one], other, one)
                self.followers.append(torch.stack([hard, torch.where(self._soft[one], one, other)]))
                left, right = left[~mixed], right[~mixed]
            self._left.append(left)
            self._right.append(right)

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """The labels of what is computed from elements of both."""
        self.unite(first, second)
        first, second = torch.broadcast_tensors(first, second)
        take = (first == NONE) | (self._soft[first] & (second != NONE) & ~self._soft[second])
        return torch.where(take, second, first)

    def merged(self, labels: Tensor, dims: Sequence[int]) -> Tensor:
        """The labels of what is computed from all elements along ``dims``, which are kept with size 1."""
        if not dims or not labels.ndim:
            return labels
        one = torch.where(self._soft[labels], NONE, labels).amax(tuple(dims), keepdim=True)
        one = torch.where(one == NONE, labels.amax(tuple(dims), keepdim=True), one)
        self.unite(labels, one)
        return one

    def any_soft(self, labels: Tensor) -> bool:
        """Return whether any of these labels belong to elements that several ranks may hold."""
        return bool(self._soft[labels].any())

    def stick(self, labels: Tensor, reason: str) -> None:
        """These cannot be split."""
        some = torch.unique(labels[labels != NONE])
        if some.numel():
            self.reasons.append((int(some[0]), reason))
            self.stuck.append(some)

    def components(self, united: int | None = None) -> Tensor:
        """For each label the smallest one that it is united with (by the first ``united`` times). int64 [labels]."""
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
    """Return whether elements that differ only in their position along ``dim`` are different ones."""
    return ids.shape[dim] > 1 and bool((ids != ids.narrow(dim, 0, 1)).any())
