"""Save and restore the state of a communicating optimizer that differs between ranks.

All other state is equal on the ranks that hold the same weights, and is saved once (``StateAccess``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.placement import placement_of
from deepspeed.checkpoint.shards import ShardIndex, intersect
from deepspeed.ops.update import ServerErrorOwner
from deepspeed.zero.gradients.sums import ErrorFeedback, feedback_of
from deepspeed.zero.placements import is_partial
from deepspeed.zero.states.access import StateAccess
from deepspeed.zero.states.fragments import OwnedFragment

BY_PARAMETER, OPTIMIZER, START, PLACE, SERVER_ERRORS = "by_parameter", "optimizer", "start", "place", "debts"
WIRE = "wire"
ROUNDING = 8
"""Elements by which padding may lengthen a rank's part of a bucket."""


class RankState:
    """Per-rank state: ``UpdateTraits.rank_state`` by parameter name, and ``rank_state_dict`` of the optimizer behind
    ``access``.

    Of each parameter a rank saves the pieces that it updates: where they begin (``START``) in which boxes of the whole
    tensor (``PLACE``), their entries of the state, and what it owes them as the one that averages
    (``SERVER_ERRORS``). So they can be put together in another layout.
    """

    def __init__(self, access: StateAccess) -> None:
        self.access = access
        self.store = access.store

    @property
    def takes_part(self) -> bool:
        return self.store.traits.own_communication or bool(self._feedbacks())

    def saved(self) -> dict[str, Any] | None:
        """Return this rank's state, live; None if neither the optimizer communicates nor a wire format keeps errors."""
        if not self.takes_part:
            return None
        wire = {index: kept for index, feedback in self._feedbacks().items() if (kept := feedback.saved())}
        if not self.store.traits.own_communication:
            return {WIRE: wire}
        optimizer: Any = self.store.optimizer
        kinds = self.store.traits.rank_state
        server_errors = self._server_errors()
        by_name: dict[str, list[dict[str, Any]]] = {}
        for index, owned, state in self._states():
            piece = {kind: state[kind] for kind in kinds if kind in state}
            errors = list(server_errors.get(id(owned.master), ()))
            about = {START: index.start, PLACE: (index.global_shape, index.boxes), SERVER_ERRORS: errors}
            by_name.setdefault(index.name, []).append({**piece, **about})
        by_parameter = {name: found[0] if len(found) == 1 else found for name, found in by_name.items()}
        return {BY_PARAMETER: by_parameter, OPTIMIZER: optimizer.rank_state_dict(), WIRE: wire}

    def load(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
        """Load from ``saved[r]``, the state of rank r; return notes for the log. Local.

        With another number of ranks or other shards, each element gets the mean over the ranks that had it. This
        keeps the mean over ranks, which is all that an exchange of momenta and errors computes. ValueError: a size
        differs.
        """
        notes = self._restore_wire(saved, rank, ranks)
        if self.store.traits.own_communication:
            notes += self._load_optimizer(saved, rank, ranks)
        return notes

    def _load_optimizer(self, parts: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
        # Another optimizer may have saved only the error feedback of gradients.
        saved = parts if len(parts) and BY_PARAMETER in parts[0] else list[Mapping[str, Any]]()
        optimizer: Any = self.store.optimizer
        alike = len(saved) == ranks and self._same_pieces(saved[rank])
        if self.store.traits.rank_state and len(saved):
            self._load_means([saved[rank]] if alike else saved)
        optimizer.load_rank_state_dict(_OptimizerStates(saved), rank, ranks)
        if len(saved) and not alike:
            if isinstance(optimizer, ServerErrorOwner):
                optimizer.forget_server_errors()
            self._add_server_errors(saved)
        # The optimizer may have restored weights that differ between ranks.
        self.store.refresh_low(self.store.fragments)
        if alike:
            return []
        return [f"what {len(saved)} ranks did not share is spread over {ranks}" if saved else "no own state"]

    def _feedbacks(self) -> dict[int, ErrorFeedback]:
        """Return the error feedback of the wire formats, by bucket index."""
        found = {b.layout.index: feedback_of(b.summed_over_ranks) for b in self.access.reducer.buckets}
        return {index: feedback for index, feedback in found.items() if feedback is not None}

    def _restore_wire(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
        """Restore the error feedback of wire formats. It belongs to one layout and format of buckets, and is reset
        for any other."""
        feedbacks = self._feedbacks()
        for feedback in feedbacks.values():  # of what was trained before this load
            feedback.forget()
        if not feedbacks:
            return []
        wire = saved[rank].get(WIRE, {}) if len(saved) == ranks else {}
        devices = {b.layout.index: (b.device, b.layout.padded_numel) for b in self.access.reducer.buckets}
        fits = all(
            index in feedbacks
            and kept.keys() == feedbacks[index].parts
            and _largest(kept) <= devices[index][1] + ROUNDING * ranks
            for index, kept in wire.items()
        )
        if not fits or not wire:
            return [
                "compression errors of gradients reset to zero: ranks, buckets or formats differ, or none were saved"
            ]
        for index, kept in wire.items():
            feedbacks[index].restore(kept, devices[index][0])
        return []

    def _server_errors(self) -> Mapping[int, Sequence[tuple[int, Tensor]]]:
        optimizer: Any = self.store.optimizer
        if not isinstance(optimizer, ServerErrorOwner):
            return {}
        params = self.store.params
        groups = [
            sorted(group, key=lambda o: is_partial(params[o.param_index])) for group in self.store.by_group
        ]
        return optimizer.server_errors([[owned.master for owned in group] for group in groups])

    def _states(self) -> list[tuple[ShardIndex, OwnedFragment, dict[str, Any]]]:
        return [(self.access.index_of(o), o, self.store.state_of(o)) for o in self.store.fragments]

    def _same_pieces(self, saved: Mapping[str, Any]) -> bool:
        """Return whether another run cut the parameters as this one does, in this order. Those without own state say
        nothing."""
        names = zip(self.access.names, self.store.params, strict=True)
        known = {name: placement_of(param).index(name) for name, param in names}
        theirs = [
            index
            for name in saved[BY_PARAMETER]
            if name in known
            for index, _ in _pieces(saved, known[name])
            if index.numel
        ]
        used = set(theirs)
        return theirs == [index for index, _, _ in self._states() if index in used]

    def _load_means(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Nothing is taken where none has any."""
        kinds = self.store.traits.rank_state
        for own, mean in self._means(saved, lambda piece: [(k, 0, piece[k]) for k in kinds if k in piece]):
            own.copy_(mean)

    def _add_server_errors(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Add the server errors of averaging ranks to every sender's error: the mean is the same."""
        kind = self.store.traits.rank_state[0]
        for own, mean in self._means(saved, lambda piece: [(kind, *e) for e in piece.get(SERVER_ERRORS, ())]):
            own.add_(mean)

    @torch.no_grad()
    def _means(
        self,
        saved: Sequence[Mapping[str, Any]],
        values_of: Callable[[Mapping[str, Any]], Iterable[tuple[str, int, Tensor]]],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield entries of the state, flat, each with the mean of what ``saved`` have of its elements. ``values_of`` a
        piece: entry, position in the piece, and values. ValueError: a tensor was saved with another shape."""
        states = self._states()
        sums: dict[tuple[int, str], Tensor] = {}
        for part in saved:
            for number, (index, _, state) in enumerate(states):
                for source, piece in _pieces(part, index):
                    for kind, begin, values in values_of(piece) if source.numel else ():
                        if kind not in state:
                            continue
                        total = sums.setdefault((number, kind), torch.zeros(2, index.numel))
                        start = source.start + begin
                        _add(total, index, replace(source, start=start, stop=start + values.numel()), values)
        for (number, kind), (total, count) in sums.items():
            own = states[number][2][kind].view(-1)
            yield own, (total / count.clamp_(min=1.0)).to(own.device)


def _pieces(saved: Mapping[str, Any], own: ShardIndex) -> list[tuple[ShardIndex, Mapping[str, Any]]]:
    """Return the pieces of the tensor that ``own`` is a part of. Older checkpoints do not say their boxes, and our
    first ones have the whole of it, without a list."""
    found = saved[BY_PARAMETER].get(own.name, ())
    indexed = []
    for piece in [found] if isinstance(found, Mapping) else found:
        shape, boxes = piece.get(PLACE, (own.global_shape, own.boxes))
        start = int(piece.get(START, 0))
        indexed.append((ShardIndex(own.name, shape, boxes, start, start + _numel(piece)), piece))
    return indexed


def _largest(kept: Mapping[str, Any]) -> int:
    return max((value.numel() for value in kept.values() if isinstance(value, Tensor)), default=0)


def _numel(piece: Mapping[str, Any]) -> int:
    return max((v.numel() for key, v in piece.items() if key not in (START, PLACE, SERVER_ERRORS)), default=0)


def _add(total: Tensor, own: ShardIndex, source: ShardIndex, values: Tensor) -> None:
    """Add ``values`` of ``source`` to the sums and counts ``total`` [2, n] of ``own``, where both are."""
    given = values.reshape(-1).to(total)
    for copy in intersect(own, [source])[0]:
        found = given.as_strided(copy.shape, copy.source_strides, given.storage_offset() + copy.source_offset)
        for row, added in zip(total, (found, 1.0), strict=True):
            row.as_strided(copy.shape, copy.target_strides, row.storage_offset() + copy.target_offset).add_(
                added
            )


class _OptimizerStates(Sequence[Mapping[str, Any]]):
    """The optimizer's ``rank_state_dict`` as each rank saved it."""

    def __init__(self, saved: Sequence[Mapping[str, Any]]) -> None:
        self.saved = saved

    def __len__(self) -> int:
        return len(self.saved)

    def __getitem__(self, rank: Any) -> Any:
        return self.saved[rank][OPTIMIZER]
