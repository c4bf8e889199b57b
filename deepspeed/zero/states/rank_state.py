"""Save and restore the state of a communicating optimizer that differs between ranks.

All other state is equal on the ranks that hold the same weights, and is saved once (``StateAccess``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.sharded import full_shape
from deepspeed.ops.update import ServerErrorOwner
from deepspeed.zero.gradients.sums import ErrorFeedback, keeper_of
from deepspeed.zero.placements import in_parts
from deepspeed.zero.states.access import StateAccess
from deepspeed.zero.states.fragments import OwnedFragment

BY_PARAMETER, OPTIMIZER, START, DEBTS = "by_parameter", "optimizer", "start", "debts"
WIRE = "wire"
ROUNDING = 8
"""Elements by which padding may lengthen a rank's part of a bucket."""


class OwnState:
    """Per-rank state: ``UpdateTraits.rank_state`` by parameter name, and ``own_state`` of the optimizer behind
    ``access``.

    A rank saves the pieces of each parameter that it updates: their start (``START``), their state entries, and its
    server errors for them (``DEBTS``). So they can be joined in another layout.
    """

    def __init__(self, access: StateAccess) -> None:
        self.access = access
        self.store = access.store

    @property
    def takes_part(self) -> bool:
        return self.store.traits.own_communication or bool(self._keepers())

    def saved(self) -> dict[str, Any] | None:
        """Return this rank's state, live; None if neither the optimizer communicates nor a wire format keeps errors."""
        if not self.takes_part:
            return None
        wire = {index: kept for index, keeper in self._keepers().items() if (kept := keeper.kept())}
        if not self.store.traits.own_communication:
            return {WIRE: wire}
        optimizer: Any = self.store.optimizer
        kinds = self.store.traits.rank_state
        server_errors = self._server_errors()
        by_name: dict[str, list[dict[str, Any]]] = {}
        for name, owned, state in self._states():
            piece = {kind: state[kind] for kind in kinds if kind in state}
            about = {START: owned.fragment.param_offset, DEBTS: list(server_errors.get(id(owned.master), ()))}
            by_name.setdefault(name, []).append({**piece, **about})
        by_parameter = {name: found[0] if len(found) == 1 else found for name, found in by_name.items()}
        return {BY_PARAMETER: by_parameter, OPTIMIZER: optimizer.own_state(), WIRE: wire}

    def load(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
        """Load from ``saved[r]``, the state of rank r; return notes for the log. Local.

        With another number of ranks or other shards, each element gets the mean over the ranks that had it. This
        keeps the mean over ranks, which is all that an exchange of momenta and errors computes. ValueError: a size
        differs.
        """
        notes = self._restore_wire(saved, rank, ranks)
        return (
            notes + self._load_optimizer(saved, rank, ranks) if self.store.traits.own_communication else notes
        )

    def _load_optimizer(self, parts: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
        # Another optimizer may have saved only the error feedback of gradients.
        saved = parts if len(parts) and BY_PARAMETER in parts[0] else list[Mapping[str, Any]]()
        optimizer: Any = self.store.optimizer
        alike = len(saved) == ranks and self._same_pieces(saved[rank])
        if self.store.traits.rank_state and len(saved):
            self._take([saved[rank]] if alike else saved)
        optimizer.load_own_state(_Parts(saved), rank, ranks)
        if len(saved) and not alike and not (self._whole() and self._same_pieces(saved[0])):
            if isinstance(optimizer, ServerErrorOwner):
                optimizer.forget_server_errors()
            self._owe(saved)
        # The optimizer may have restored weights that differ between ranks.
        self.store.refresh_low(self.store.fragments)
        if alike:
            return []
        return [f"what {len(saved)} ranks did not share is spread over {ranks}" if saved else "no own state"]

    def _keepers(self) -> dict[int, ErrorFeedback]:
        """Return the error feedback of the wire formats, by bucket index."""
        found = {b.layout.index: keeper_of(b.summed_over_ranks) for b in self.access.reducer.buckets}
        return {index: keeper for index, keeper in found.items() if keeper is not None}

    def _restore_wire(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
        """Restore the error feedback of wire formats. It belongs to one layout and format of buckets, and is reset
        for any other."""
        keepers = self._keepers()
        if not keepers:
            return []
        wire = saved[rank].get(WIRE, {}) if len(saved) == ranks else {}
        devices = {b.layout.index: (b.device, b.layout.padded_numel) for b in self.access.reducer.buckets}
        fits = all(
            index in keepers
            and kept.keys() == keepers[index].parts
            and _largest(kept) <= devices[index][1] + ROUNDING * ranks
            for index, kept in wire.items()
        )
        if not fits or not wire:
            return [
                "errors of compressed gradients start anew: other ranks, buckets or formats, or none were saved"
            ]
        for index, kept in wire.items():
            keepers[index].restore(kept, devices[index][0])
        return []

    def _server_errors(self) -> Mapping[int, Sequence[tuple[int, Tensor]]]:
        optimizer: Any = self.store.optimizer
        if not isinstance(optimizer, ServerErrorOwner):
            return {}
        params = self.store.params
        groups = [
            sorted(group, key=lambda o: in_parts(params[o.param_index])) for group in self.store.by_group
        ]
        return optimizer.server_errors([[owned.master for owned in group] for group in groups])

    def _states(self) -> list[tuple[str, OwnedFragment, dict[str, Any]]]:
        names, store = self.access.names, self.store
        return [(names[o.param_index], o, store.state_of(o)) for o in store.fragments]

    def _same_pieces(self, saved: Mapping[str, Any]) -> bool:
        """Return whether ``saved`` has the parameters in the same pieces and order as this rank. Parameters without
        per-rank state are ignored."""
        known = set(self.access.names)
        theirs = [
            (name, start, _numel(piece))
            for name in saved[BY_PARAMETER]
            if name in known
            for start, piece in _pieces(saved, name)
            if _numel(piece)
        ]
        used = set(theirs)
        mine = [
            (name, owned.fragment.param_offset, owned.fragment.numel) for name, owned, _ in self._states()
        ]
        return theirs == [piece for piece in mine if piece in used]

    def _whole(self) -> bool:
        """Return whether every parameter is in one piece here. The optimizer then redistributes errors itself, if the
        saved ones were in one piece too."""
        return all(
            owned.fragment.numel == full_shape(self.store.params[owned.param_index]).numel()
            for _, owned, _ in self._states()
        )

    @torch.no_grad()
    def _take(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Set each element to its mean over ``saved``, or to zero where none has it; state that is in none of them is
        left alone."""
        totals: dict[tuple[int, str], Tensor] = {}
        counts: dict[tuple[int, str], Tensor] = {}
        for part in saved:
            for number, (name, owned, state) in enumerate(self._states()):
                for start, piece in _pieces(part, name):
                    for kind in self.store.traits.rank_state:
                        if kind not in state or kind not in piece:
                            continue
                        if (number, kind) not in totals:
                            totals[number, kind] = torch.zeros(state[kind].numel(), dtype=torch.float32)
                            counts[number, kind] = torch.zeros(state[kind].numel(), dtype=torch.float32)
                        self._check(kind, name, owned, start + piece[kind].numel())
                        _add(totals[number, kind], owned, start, piece[kind])
                        _add(counts[number, kind], owned, start, torch.ones(piece[kind].numel()))
        states = self._states()
        for (number, kind), total in totals.items():
            own = states[number][2][kind].view(-1)
            own.copy_(total.div_(counts[number, kind].clamp_(min=1.0)))

    def _check(self, kind: str, name: str, owned: OwnedFragment, end: int) -> None:
        numel = full_shape(self.store.params[owned.param_index]).numel()
        if end > numel:
            raise ValueError(
                f"{kind} of {name} has at least {end} elements in the checkpoint, and {numel} in the model"
            )

    @torch.no_grad()
    def _owe(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Add the server errors of averaging ranks to every sender's error: the mean is the same."""
        kind = self.store.traits.rank_state[0]
        for part in saved:
            for name, owned, state in self._states():
                for start, piece in _pieces(part, name):
                    for begin, debt in piece.get(DEBTS, ()) if kind in state else ():
                        _add(state[kind].view(-1), owned, start + begin, debt)


def _pieces(saved: Mapping[str, Any], name: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the pieces of a parameter with their starts. An entry that is no list is one piece (in our first
    checkpoints, the whole parameter)."""
    found = saved[BY_PARAMETER].get(name, ())
    pieces = [found] if isinstance(found, Mapping) else found
    return [(int(piece.get(START, 0)), piece) for piece in pieces]


def _largest(kept: Mapping[str, Any]) -> int:
    return max((value.numel() for value in kept.values() if isinstance(value, Tensor)), default=0)


def _numel(piece: Mapping[str, Any]) -> int:
    sizes = [value.numel() for key, value in piece.items() if key not in (START, DEBTS)]
    return max(sizes, default=0)


def _add(target: Tensor, owned: OwnedFragment, start: int, values: Tensor) -> None:
    """Add ``values`` [n], from offset ``start`` of the parameter, to the overlapping part of ``target``, the piece of
    ``owned``."""
    first, values = owned.fragment.param_offset, values.reshape(-1)
    low, high = max(first, start), min(first + target.numel(), start + values.numel())
    if low < high:
        target[low - first : high - first].add_(values[low - start : high - start].to(target.device))


class _Parts(Sequence[Mapping[str, Any]]):
    """The optimizer's ``own_state`` as each rank saved it."""

    def __init__(self, saved: Sequence[Mapping[str, Any]]) -> None:
        self.saved = saved

    def __len__(self) -> int:
        return len(self.saved)

    def __getitem__(self, rank: Any) -> Any:
        return self.saved[rank][OPTIMIZER]
