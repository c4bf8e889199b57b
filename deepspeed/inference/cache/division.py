"""Division of cache memory among the models of a server. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def divide(total: int, wanted: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Divide ``total`` bytes in proportion to ``shares``, at most ``wanted`` for each model; what a model cannot use is
    divided among the others, again in proportion. Returns bytes by model."""
    parts, left, shares_left = [0] * len(wanted), total, sum(shares)
    # Ascending by how much of its share a model can use, so that its unused part is known before the others' turn.
    for at in sorted(range(len(wanted)), key=lambda at: wanted[at] / shares[at]):
        parts[at] = min(wanted[at], int(left * shares[at] / shares_left))
        left, shares_left = left - parts[at], shares_left - shares[at]
    return parts
