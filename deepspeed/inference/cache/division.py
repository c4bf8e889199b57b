"""How the memory for caches is divided among the models of a server. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def divide(total: int, wanted: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return bytes for each model: ``total`` in proportion to ``shares``; what a part has beyond the most that its
    model can use (``wanted``) goes to the others, in proportion again."""
    parts = [0] * len(wanted)
    open_ones = list(range(len(wanted)))
    while open_ones:
        sum_of_shares = sum(shares[at] for at in open_ones)
        fair = {at: int(total * shares[at] / sum_of_shares) for at in open_ones}
        satisfied = [at for at in open_ones if wanted[at] <= fair[at]]
        for at in satisfied or open_ones:
            parts[at] = min(wanted[at], fair[at])
        if not satisfied:
            break
        total -= sum(parts[at] for at in satisfied)
        open_ones = [at for at in open_ones if at not in satisfied]
    return parts
