"""Where master weights and optimizer state are kept: ``ResidentTier``, where the update happens.

``offload/tiers.py`` has what keeps them in host memory or on storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.zero.layout import BucketLayout, Fragment
from deepspeed.zero.states.fragments import GroupTensors, OwnedFragment

Groups = list[GroupTensors]
StateOf = Callable[[OwnedFragment], dict[str, Any]]


class ResidentTier:
    """State and masters are kept where they are updated: nothing moves."""

    cuts = False
    """Whether fragments may be owned in ``pieces``."""

    on_file = False
    """Whether any of what it keeps, gradients too, is mapped from a file."""

    def takes(self, layout: BucketLayout) -> bool:
        """Whether the state of this bucket is kept elsewhere."""
        return False

    def of(self, layout: BucketLayout) -> ResidentTier:
        """The tier that places the masters of this bucket."""
        return self if self.takes(layout) else ResidentTier()

    def own_master(self, weights: Tensor) -> bool:
        """Whether these weights need a separate master even if they have the master dtype."""
        return False

    def pieces(self, fragment: Fragment) -> Sequence[Fragment]:
        """The fragment in the pieces to be owned; an offloading tier splits large ones."""
        return [fragment]

    def masters(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """[n] copy of ``weights`` in the master dtype, where the tier keeps masters."""
        return weights.to(dtype, copy=True)

    def new_gradients(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel] undefined memory for the summed gradients of a bucket on ``device``."""
        return torch.empty(numel, dtype=dtype, device=device)

    def adopt(self, groups: Sequence[Sequence[OwnedFragment]], state_of: StateOf) -> None:
        """Take over these fragments, by optimizer group. Called when their masters exist."""

    def update(self, groups: Groups, apply: Callable[[Groups], None]) -> None:
        """``apply`` the optimizer to ``groups``, in as many parts as fit."""
        apply(groups)

    def batches(self, groups: list[list[OwnedFragment]]) -> Iterator[list[list[OwnedFragment]]]:
        """``groups`` in parts whose state may be in memory at the same time."""
        yield groups

    def rest(self) -> None:
        """State was created or replaced outside ``update``: move it to where it is stored."""

    def forget_state(self) -> None:
        """All optimizer state has been dropped."""

    def describe(self) -> str:
        """One line for the start of a run; empty if there is nothing to say."""
        return ""

    def check(self) -> None:
        """State is about to be accessed outside ``update``. OSError: the file that holds it is damaged."""

    def close(self) -> None:
        """The engine is done with the state."""
