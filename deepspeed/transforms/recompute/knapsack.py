"""Choice of results to keep or recompute: minimal FLOPs within a byte budget.

Two knapsack problems. Within a block, each operation's result is kept, for its bytes, or recomputed, for its FLOPs; the
best sets for all sizes are the block's *options* to run, besides keeping everything like autograd. Over the blocks, one
option each is chosen. Both are solved by dynamic programming over bytes, in units rounded up, so the budget holds.

[Note: the last blocks] Backward reruns a block before backpropagating through it, so all that the block would have
saved is alive then, while later blocks are already freed. Recomputing the last block thus does not lower the peak
unless what follows it is as large; and of identical blocks, those that keep more come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed.transforms.recompute.block_record import BlockRecord, Key, RecordedOp

UNITS_OF_BLOCK = 512
UNITS = 8192
ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOption:
    """An option to run a block. ``kept``: bytes kept from forward to backward, ``rerun_bytes``: bytes after the rerun.
    ``cost``, ``flops``: of the rerun. ``chosen``: operations whose results are kept; None: everything is kept, without
    a rerun."""

    kept: int
    rerun_bytes: int
    cost: int
    flops: int
    chosen: frozenset[Key] | None


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a model, in call order: its kind, and the number of calls per forward."""

    kind: int
    calls: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory footprint of a forward. ``outside``: bytes saved outside blocks, ``before`` of them before the last block
    ends; ``kinds``: one call of each kind of block."""

    kinds: Sequence[BlockRecord]
    blocks: Sequence[Block]
    outside: int = 0
    before: int = 0

    @property
    def everything(self) -> int:
        """Bytes kept without recomputation."""
        return self.outside + sum(self.kinds[b.kind].saved * b.calls for b in self.blocks)

    @property
    def flops(self) -> int:
        """FLOPs of the blocks, forward and backward (twice the forward)."""
        return 3 * sum(self.kinds[b.kind].flops * b.calls for b in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """The chosen ``options``, one per block. ``peak``: in bytes; ``extra``: recomputed FLOPs."""

    counted: Footprint
    options: Sequence[RecomputeOption]
    budget: int
    peak: int = 0

    @property
    def extra(self) -> int:
        blocks = self.counted.blocks
        return sum(option.flops * block.calls for option, block in zip(self.options, blocks, strict=True))

    @property
    def extra_share(self) -> float:
        """Recomputed FLOPs as a share of the blocks' forward and backward."""
        return self.extra / self.counted.flops if self.counted.flops else 0.0


class BudgetTooSmall(ValueError):
    """The budget is exceeded even with everything recomputed; ``least``: the minimum feasible bytes."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the blocks keep at least {least} bytes")
        self.least = least


def recompute_options(record: BlockRecord) -> list[RecomputeOption]:
    """Return the options to run a block, by increasing bytes; the last one keeps everything."""
    whole = RecomputeOption(kept=record.saved, rerun_bytes=record.saved, cost=0, flops=0, chosen=None)
    needed = record.ops[: record.needed]
    items = [op for op in needed if op.keepable and op.out and op.cost]
    cost, flops = sum(op.cost for op in needed), sum(op.flops for op in needed)
    options: list[RecomputeOption] = []
    for kept in _best_sets(items, record.saved - record.inputs):
        nbytes = record.inputs + sum(op.out for op in kept)
        option = RecomputeOption(
            kept=nbytes,
            rerun_bytes=record.saved + sum(op.out for op in kept if not op.saved),
            cost=1 + cost - sum(op.cost for op in kept),  # a rerun is never free
            flops=flops - sum(op.flops for op in kept),
            chosen=frozenset(op.key for op in kept),
        )
        if nbytes < record.saved and (not options or option.cost < options[-1].cost):
            options.append(option)
    return [*options, whole]


def _best_sets(items: Sequence[RecordedOp], most: int) -> list[list[RecordedOp]]:
    """Return the sets of results that save the highest cost for their bytes, from none to ``most`` bytes."""
    unit = max(1, -(-most // UNITS_OF_BLOCK))
    best: list[tuple[int, int]] = [(0, 0)] * (UNITS_OF_BLOCK + 1)  # cost, and the set as bits
    for number, op in enumerate(items):
        weight = -(-op.out // unit)
        for size in range(UNITS_OF_BLOCK, weight - 1, -1):
            cost, chosen = best[size - weight]
            if cost + op.cost > best[size][0]:
                best[size] = cost + op.cost, chosen | 1 << number
    distinct = dict.fromkeys(chosen for _, chosen in best)
    return [[op for number, op in enumerate(items) if chosen >> number & 1] for chosen in distinct]


def choose(counted: Footprint, budget: int) -> RecomputeChoice:
    """Choose the cheapest options with a peak of at most ``budget`` bytes.

    Raises:
        BudgetTooSmall: there are none.
    """
    by_kind = [recompute_options(record) for record in counted.kinds]
    whole = [by_kind[block.kind][-1] for block in counted.blocks]
    if counted.everything <= budget:
        return RecomputeChoice(counted=counted, options=whole, budget=budget, peak=counted.everything)
    found = [
        choice
        for last_whole in (False, True)
        if (choice := _within(counted, by_kind, budget, last_whole)) is not None
    ]
    if not found:
        raise BudgetTooSmall(_least(counted, by_kind))
    return min(
        found,
        key=lambda choice: sum(w.cost * b.calls for w, b in zip(choice.options, counted.blocks, strict=True)),
    )


def _within(
    counted: Footprint, by_kind: Sequence[Sequence[RecomputeOption]], budget: int, last_whole: bool
) -> RecomputeChoice | None:
    """Solve for the kept bytes, lowering them until the peak fits too (Note: the last blocks); None if impossible."""
    room = budget - counted.outside
    for _ in range(ROUNDS):
        options = _solved(counted, by_kind, room, last_whole)
        if options is None:
            return None
        peak = peak_of(counted, options)
        if peak <= budget:
            return RecomputeChoice(counted=counted, options=options, budget=budget, peak=peak)
        room -= peak - budget
    return None


def _least(counted: Footprint, by_kind: Sequence[Sequence[RecomputeOption]]) -> int:
    least = [by_kind[block.kind][0] for block in counted.blocks]
    peaks = [peak_of(counted, least)]
    if least:
        peaks.append(peak_of(counted, [*least[:-1], by_kind[counted.blocks[-1].kind][-1]]))
    return min(peaks)


def _solved(
    counted: Footprint, by_kind: Sequence[Sequence[RecomputeOption]], room: int, last_whole: bool
) -> list[RecomputeOption] | None:
    if room < 0:
        return None
    unit = max(1, -(-room // UNITS))
    size = room // unit
    best = torch.zeros(size + 1, dtype=torch.float64)
    taken: list[torch.Tensor] = []
    choices = [by_kind[block.kind] for block in counted.blocks]
    if last_whole and choices:
        choices[-1] = choices[-1][-1:]
    for block, options in zip(counted.blocks, choices, strict=True):
        rows = torch.full((len(options), size + 1), torch.inf, dtype=torch.float64)
        for row, option in zip(rows, options, strict=True):
            weight = -(-option.kept * block.calls // unit)
            if weight <= size:
                row[weight:] = best[: size + 1 - weight] + option.cost * block.calls
        best, which = rows.min(0)
        taken.append(which)
    if size < 0 or torch.isinf(best[size]):
        return None
    found: list[RecomputeOption] = []
    backwards = (reversed(column) for column in (counted.blocks, choices, taken))
    for block, options, which in zip(*backwards, strict=True):
        found.append(options[int(which[size])])
        size -= -(-found[-1].kept * block.calls // unit)
    return _larger_last(counted.blocks, found[::-1])


def _larger_last(blocks: Sequence[Block], options: list[RecomputeOption]) -> list[RecomputeOption]:
    for kind in set(blocks):
        places = [place for place, block in enumerate(blocks) if block == kind]
        ordered = sorted((options[place] for place in places), key=lambda option: option.kept)
        for place, option in zip(places, ordered, strict=True):
            options[place] = option
    return options


def peak_of(counted: Footprint, options: Sequence[RecomputeOption]) -> int:
    """Return the maximum of the bytes kept at the end of forward and those while any rerun block is alive."""
    kept = [option.kept * block.calls for option, block in zip(options, counted.blocks, strict=True)]
    peak, so_far = counted.outside + sum(kept), counted.before
    for block, option, nbytes in zip(counted.blocks, options, kept, strict=True):
        if option.chosen is not None:
            peak = max(peak, so_far + option.kept * (block.calls - 1) + option.rerun_bytes)
        so_far += nbytes
    return peak
