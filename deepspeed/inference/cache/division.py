"""Division of the memory for caches among the models of a server. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def divide(total: int, wanted: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return bytes for each model: ``total`` in proportion to ``shares``; what a part has beyond the most that its
    model can use (``wanted``) goes to the others, in proportion again."""
    parts, left, shares_left = [0] * len(wanted), total, sum(shares)
    # Those that use their part least come first, so that what they leave is known for the others.
    for at in sorted(range(len(wanted)), key=lambda at: wanted[at] / shares[at]):
        parts[at] = min(wanted[at], int(left * shares[at] / shares_left))
        left, shares_left = left - parts[at], shares_left - shares[at]
    return parts
