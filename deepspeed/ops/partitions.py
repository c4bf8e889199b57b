"""Partition a sequence of items into runs of equal length or equal weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Return inclusive prefix sums: ``[1, 2, 3]`` gives ``[1, 3, 6]``."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return bounds ``[0, ..., num_items]`` of ``num_parts`` equal runs; the first ones take the remainder."""
    size, left_over = divmod(num_items, num_parts)
    return [part * size + min(part, left_over) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return bounds ``[0, ..., len(weights)]`` of ``num_parts`` runs that minimize the heaviest run.

    Ties are broken by the most even weights, then the most even lengths (least sum of squares), then longer runs first,
    except that a trailing item without weight that makes a run longer than the next moves to the next. Empty runs occur
    only if there are fewer items than runs.
    """
    items = len(weights)
    if items <= num_parts:
        return [min(part, items) for part in range(num_parts + 1)]
    sums = [0, *accumulate(weights)]
    limit = _lightest_bottleneck(sums, num_parts)
    # best[i]: cost of partitioning items i.. into the runs so far, counted from the last, and minus the first cut.
    best: list[tuple[float, int, int] | None] = [None] * (items + 1)
    best[items] = (0, 0, -items)
    cuts: list[list[int]] = []
    for _ in range(num_parts):
        better: list[tuple[float, int, int] | None] = [None] * (items + 1)
        for start in range(items):
            for stop in range(start + 1, items + 1):
                weight = sums[stop] - sums[start]
                if weight > limit:
                    break
                rest = best[stop]
                if rest is None:
                    continue
                candidate = (weight**2 + rest[0], (stop - start) ** 2 + rest[1], -stop)
                known = better[start]
                if known is None or candidate < known:
                    better[start] = candidate
        best = better
        cuts.append([0 if entry is None else -entry[2] for entry in better])
    bounds = [0]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    for cut in range(num_parts - 1, 0, -1):
        before, after = bounds[cut] - bounds[cut - 1], bounds[cut + 1] - bounds[cut]
        loaded = any(weights[bounds[cut - 1] : bounds[cut]])
        if loaded and weights[bounds[cut] - 1] == 0 and before == after + 1:
            bounds[cut] -= 1  # swaps the two lengths
    return bounds


def _lightest_bottleneck(sums: Sequence[float], num_parts: int) -> float:
    """Return the least weight of the heaviest of ``num_parts`` non-empty runs; ``sums`` are prefix sums from 0."""
    items = len(sums) - 1
    heaviest = [math.inf] * items + [-math.inf]  # for items i.. in the runs so far, counted from the last
    for _ in range(num_parts):
        following, heaviest = heaviest, [math.inf] * (items + 1)
        for start in range(items):
            for stop in range(start + 1, items + 1):
                weight = sums[stop] - sums[start]
                if weight >= heaviest[start]:
                    break
                heaviest[start] = min(heaviest[start], max(weight, following[stop]))
    return heaviest[0]
