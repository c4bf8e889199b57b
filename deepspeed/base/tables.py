"""Tables and lists of text."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence


def first_of(items: Sequence[object], most: int = 4) -> str:
    """Join the first ``most`` items with commas, and count the rest."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def counted(number: int, noun: str) -> str:
    """Format a number of things: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def padded(rows: Sequence[Sequence[str]], left: Container[int] | None = None) -> Iterator[list[str]]:
    """Yield the cells of each row, each as wide as the widest of its column. ``left``: the columns that are aligned to
    the left, the others to the right; default: all."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield [
            cell.ljust(width) if left is None or column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
