"""What an optimizer with communication of its own does not share with other ranks: saved by each rank, and restored.

Everything else in its state is the same on all ranks that hold the same weights, and is saved once (``StateAccess``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.runtime.zero.access import StateAccess

BY_PARAMETER, OPTIMIZER = "by_parameter", "optimizer"


class OwnState:
    """``UpdateTraits.rank_state`` by parameter name, and ``own_state`` of the optimizer that ``access`` serves."""

    def __init__(self, access: StateAccess) -> None:
        self.access = access
        self.store = access.store

    @property
    def takes_part(self) -> bool:
        return self.store.traits.own_communication

    def saved(self) -> dict[str, Any] | None:
        """This rank's part, live; None for an optimizer without communication of its own."""
        if not self.store.traits.own_communication:
            return None
        optimizer: Any = self.store.optimizer
        kinds = self.store.traits.rank_state
        return {
            BY_PARAMETER: {
                name: {kind: state[kind] for kind in kinds if kind in state} for name, state in self._states()
            },
            OPTIMIZER: optimizer.own_state(),
        }

    def load(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
        """Take what ``saved[r]`` says that rank r had; returns notes for the log. Local.

        With another number of ranks, each gets the mean of all, so that the mean over ranks, which is what an exchange
        of momenta and errors computes, is what it was. ValueError: a size differs.
        """
        optimizer: Any = self.store.optimizer
        if self.store.traits.rank_state and len(saved):
            sources = [rank] if len(saved) == ranks else range(len(saved))
            for source in sources:
                self._add(saved[source][BY_PARAMETER], 1.0 / len(sources), first=source == sources[0])
        optimizer.load_own_state(_Parts(saved), rank, ranks)
        self.store.refresh_low(
            self.store.fragments
        )  # it may have restored weights that differ from rank to rank
        if len(saved) == ranks:
            return []
        return [f"what {len(saved)} ranks did not share is spread over {ranks}" if saved else "no own state"]

    def _states(self) -> list[tuple[str, dict[str, Any]]]:
        names, store = self.access.names, self.store
        return [(names[o.param_index], store.state_of(o)) for o in store.fragments]

    def _add(self, by_name: Mapping[str, Mapping[str, Tensor]], share: float, *, first: bool) -> None:
        for name, state in self._states():
            for kind, value in by_name.get(name, {}).items():
                if kind not in state:
                    continue
                own = state[kind].view(-1)
                if own.numel() != value.numel():
                    raise ValueError(f"{kind} of {name} has shape {tuple(value.shape)} in the checkpoint")
                with torch.no_grad():
                    if first:
                        own.zero_()
                    own.add_(value.to(own.device).view(-1), alpha=share)


class _Parts(Sequence[Mapping[str, Any]]):
    """The optimizer's own part of what each rank saved."""

    def __init__(self, saved: Sequence[Mapping[str, Any]]) -> None:
        self.saved = saved

    def __len__(self) -> int:
        return len(self.saved)

    def __getitem__(self, rank: Any) -> Any:
        return self.saved[rank][OPTIMIZER]
