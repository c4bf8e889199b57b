"""Draws curves of a run as a small SVG, for the page of an example.

    python tools/draw_curves.py OUT/loss.svg dense=OUT/dense.csv experts=OUT/experts.csv --columns step loss
    python tools/draw_curves.py OUT/loss.svg DPO=OUT/log.txt --columns epoch loss

Each curve is a file with the name that the legend gives it: a CSV file, whose first line names the columns, or what a
run printed, with `step=50, loss=0.1`, `step 50: loss 0.1` or `{'epoch': 1, 'loss': '0.1'}` in its lines. With one
column, the other one of each curve has its name. `--mean N` draws the mean of the last N rows in place of each row,
since losses of single batches jump.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

COLOURS = ("#2a6f97", "#c1440e", "#5a7d2a", "#7b4b94", "#8a6d1d")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 60, 150, 20, 50
POINTS = 200
"""Of a curve at most: more are not seen at this width."""

Curve = list[tuple[float, float]]


def read(path: Path, columns: Sequence[str], mean: int) -> Curve:
    """Return the two columns of a file, the second one as a moving mean."""
    with open(path, newline="") as file:
        found: Iterable[Mapping[str, str]] = (
            csv.DictReader(file) if path.suffix == ".csv" else printed(file, columns)
        )
        rows = [(float(row[columns[0]]), float(row[columns[1]])) for row in found]
    mean = min(mean, len(rows))
    ends = range(mean, len(rows) + 1, max(1, len(rows) // POINTS))
    return [(rows[end - 1][0], sum(y for _, y in rows[end - mean : end]) / mean) for end in ends]


def printed(lines: Iterable[str], columns: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Yield the values of the columns, from each line that has them all."""
    for line in lines:
        pairs = dict(re.findall(r"([\w/.-]+)'?(?:=|: | )'?(-?\d[\d.e+-]*)", line))
        if set(columns) <= set(pairs):
            yield pairs


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers within the limits, four to nine of them."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= max((factor for factor in (1, 2, 5) if (high - low) / (factor * step) >= 3), default=1)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(curves: dict[str, Curve], titles: Sequence[str]) -> str:
    """Return the SVG of named curves; ``titles``: of the two axes."""
    points = [point for curve in curves.values() for point in curve]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        return LEFT + (value - left) / ((right - left) or 1) * wide

    def y(value: float) -> float:
        return TOP + (high - value) / ((high - low) or 1) * tall

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{tall}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT + wide / 2:g}" y="{HEIGHT - 12}" text-anchor="middle">{escape(titles[0])}</text>',
        f'<text x="16" y="{TOP + tall / 2:g}" text-anchor="middle" '
        f'transform="rotate(-90 16 {TOP + tall / 2:g})">{escape(titles[1])}</text>',
    ]
    for tick in ticks(left, right):
        parts.append(f'<text x="{x(tick):.1f}" y="{TOP + tall + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in ticks(low, high):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}h{wide}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for at, (name, curve) in enumerate(curves.items()):
        line, colour = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve), COLOURS[at % len(COLOURS)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(
            f'<text x="{LEFT + wide + 10}" y="{TOP + 14 + 18 * at}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> None:
    """Read the curves and write the picture."""
    parser = argparse.ArgumentParser(description="Draws curves of a run as a small SVG.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("curves", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--columns", nargs="+", default=["step", "loss"], help="across and up")
    parser.add_argument("--titles", nargs=2, help="of the axes; default: the columns")
    parser.add_argument("--mean", type=int, default=1, help="rows of a moving mean")
    options = parser.parse_args(argv)
    named = dict(curve.split("=", 1) for curve in options.curves)
    across, up = options.columns[0], options.columns[1:2]
    curves = {name: read(Path(path), [across, *(up or [name])], options.mean) for name, path in named.items()}
    titles = options.titles or [across, *(up or ["loss"])]
    options.picture.write_text(draw(curves, titles), encoding="utf-8")


if __name__ == "__main__":
    main()
