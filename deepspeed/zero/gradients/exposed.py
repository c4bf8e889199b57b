"""Gradients that scripts find in ``param.grad`` after a backward, at stage 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepspeed.zero.gradients.bucket import GradBucket


class GradPlace(NamedTuple):
    """Place of a parameter's gradient: its bucket, with the bucket's number, and the position in it."""

    number: int
    bucket: GradBucket
    position: int


def _own_references() -> int:
    """Return ``sys.getrefcount`` of an object that nobody else holds, as `ExposedGrads.withdraw` asks it."""
    held = [object()]
    last = held.pop()
    return sys.getrefcount(last)


_OWN_REFERENCES = _own_references()


class ExposedGrads:
    """Views of summed gradients in ``param.grad``. A script may read, change, assign and keep them."""

    def __init__(self) -> None:
        self.params: list[nn.Parameter] = []
        """Those whose ``grad`` is a view of the sum, unless the script has set it."""
        self._views: list[Tensor] = []
        """All that were handed out after the last backward."""

    def show(self, params: Sequence[nn.Parameter], used: Sequence[bool], places: Sequence[GradPlace]) -> None:
        """Set ``grad`` of the ``used`` ones of ``params``."""
        self.params, self._views = [], []
        for index, param in enumerate(params):
            if used[index]:
                _, bucket, position = places[index]
                if bucket.dtype == param.dtype:  # autograd refuses a gradient of another dtype
                    param.grad = bucket.views[position].detach()  # the caller's own object
                    self.params.append(param)
                    self._views.append(param.grad)

    def withdraw(self) -> bool:
        """Set ``grad`` to None, so that autograd hands over new tensors instead of adding in place. Gradients that a
        script keeps stay what they are, in memory of their own, as the sums are written again.

        Returns whether the script, or its optimizer, had set all of them to None: it has dropped the sums.
        """
        dropped = bool(self.params) and all(param.grad is None for param in self.params)
        for param in self.params:
            param.grad = None
        self.params = []
        while self._views:
            grad = self._views.pop()
            if sys.getrefcount(grad) > _OWN_REFERENCES:
                grad.data = grad.data.clone()
        return dropped

    def forget(self) -> None:
        """Expect nothing of any ``grad``: the sums are dropped."""
        self.params = []

    def take_assigned(
        self, params: Sequence[nn.Parameter], used: list[bool], places: Sequence[GradPlace]
    ) -> None:
        """Take what the script has assigned since the backward, or without one, for the sum over ranks. Parameters
        whose gradient it has set to None are not updated: ``used`` becomes False."""
        exposed = {id(param) for param in self.params}
        for index, param in enumerate(params):
            grad = param.grad
            if grad is None:
                if id(param) in exposed:
                    used[index] = False
                continue
            _, bucket, position = places[index]
            if bucket.local is not None or bucket.in_flight is not None:
                continue  # still to be summed
            if id(param) in exposed and grad.data_ptr() == bucket.views[position].data_ptr():
                continue
            with torch.no_grad():
                bucket.replace(position, grad.detach())
            used[index] = True
