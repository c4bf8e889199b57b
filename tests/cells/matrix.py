"""Writes ``docs/composability.md`` from the committed results: ``python -m tests.cells.matrix``."""

from __future__ import annotations

import collections
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cells import draw
from tests.cells.__main__ import RESULTS, rows_of
from tests.cells.cell import CHOICES, FAMILIES, STEPS, parse
from tests.cells.oracle import LOSSY, TOLERANCES
from tests.cells.run import WITHIN_NOISE

PAGE = Path(__file__).parents[2] / "docs" / "composability.md"
FEW = 10
"""Features that a square of a table names; more are counted."""
IMAGE = PAGE.parent / "images" / "composability.svg"
MATRIX: dict[str, tuple[Any, ...]] = {
    name: tuple(value for value in values[1:] if value not in FAMILIES) for name, values in CHOICES.items()
} | {"axes": ("tp", "sp", "pp", "ep")}
"""The rows and columns; an axis stands for every combination that has it."""

NOT_DRAWN = (
    "Transformers models and the UNet are drawn with the features that do not change their layers. Cells cannot "
    "express yet: more than 4 ranks; two axes on 4 ranks together with a third; learned masks, ranges from statistics "
    "and MoQ; devices other than CPUs. The 1-bit optimizers exchange their signs without loss "
    "here, so that the update is a formula of the gradients. Quantized weights (qwZ), quantized gradients (qgZ), the "
    "int8 codec and sums in bf16 are compared with their own formulas in fp32 cells with data parallelism alone; "
    "elsewhere with training without quantization, with a wider tolerance."
)


NEAR = (
    "Losses and norms may differ by these relative amounts, a weight by this fraction of its distance from the initial "
    "value. Some cells are more sensitive than others of the same precision, for example if an optimizer divides by a "
    "gradient that is nearly zero in 16 bits. A cell outside of these tolerances gets its own: plain PyTorch trains it "
    "up to twelve more times with weights perturbed by half a unit in the last place, or codes of another layout, and "
    "twice the largest resulting difference is allowed. Where a 1-bit optimizer gets gradients of few bits in an "
    "unknown layout, the furthest sixteenth of a tensor's elements is left out: it divides by variances that the codes "
    "may have rounded to nothing."
)


@dataclass
class Square:
    equal: int = 0
    refused: int = 0
    faults: int = 0

    @property
    def color(self) -> str:
        if self.faults:
            return "#d73027"
        if self.refused:
            return "#fdae61" if self.equal else "#8c6bb1"
        return next(color for least, color in SHADES if self.equal >= least)

    def __str__(self) -> str:
        said = {"equal": self.equal, "refused": self.refused, "wrong": self.faults}
        return ", ".join(f"{count} {name}" for name, count in said.items() if count) or "not drawn"


SHADES = ((8, "#006d2c"), (4, "#31a354"), (2, "#74c476"), (1, "#c7e9c0"), (0, "#ffffff"))
"""Of a number of cells that are all equal."""


@dataclass
class Results:
    cells: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    squares: dict[tuple[str, str], Square] = field(default_factory=lambda: collections.defaultdict(Square))
    features: dict[str, Square] = field(default_factory=lambda: collections.defaultdict(Square))
    by_noise: int = 0
    """Equal cells that differ by what other roundings change."""
    refusals: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))
    seeds: set[int] = field(default_factory=set)
    families: set[str] = field(default_factory=set)
    ranks: collections.Counter[int] = field(default_factory=collections.Counter)
    covered: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    faults: list[tuple[str, int, str]] = field(default_factory=list)
    """(cell, seed, what was wrong)"""


def gathered(rows: Iterable[dict[str, Any]]) -> Results:
    """Counts of all rows, of each pair and of each reason for a refusal."""
    results = Results()
    for row in rows:
        cell = parse(row["cell"])
        results.cells += 1
        results.outcomes[row["outcome"]] += 1
        results.seeds.add(row.get("seed", 0))
        results.ranks[cell.ranks] += 1
        if cell.model in FAMILIES:
            results.families.add(cell.model)
        else:
            results.covered.update(cell.pairs())
        labels = labels_of(cell.features())
        kind = row["outcome"] if row["outcome"] in ("equal", "refused") else "faults"
        for square in (
            *(results.features[each] for each in labels),
            *(results.squares[pair] for pair in itertools.combinations(labels, 2)),
        ):
            setattr(square, kind, getattr(square, kind) + 1)
        results.by_noise += row["what"].startswith(WITHIN_NOISE)
        if row["outcome"] == "refused":
            results.refusals[reason(row["what"])].append(row["cell"])
        elif row["outcome"] != "equal":
            results.faults.append((row["cell"], row.get("seed", 0), reason(row["what"])))
    return results


def all_labels() -> list[str]:
    return [label(name, value) for name, values in MATRIX.items() for value in values]


def labels_of(features: dict[str, Any]) -> list[str]:
    """The rows of the matrix that a cell belongs to, in the matrix's order."""
    found: list[str] = []
    for name, values in MATRIX.items():
        had = str(features.get(name, "")).split("+") if name == "axes" else [features.get(name)]
        found += [label(name, value) for value in values if value in had]
    return found


def label(name: str, value: Any) -> str:
    return (name if value is True else f"{name} {value}").replace("_", " ")


def reason(what: str) -> str:
    """A refusal without the numbers of its cell."""
    text = " ".join(what.split())
    return re.sub(r"^\w+Error: ", "", text)


def page(results: Results) -> str:
    """The whole page."""
    total = max(results.cells, 1)
    shares = ", ".join(f"{count} {outcome}" for outcome, count in results.outcomes.most_common())
    labels = all_labels()
    lines = [
        "# Combining features",
        "",
        "<!-- written by python -m tests.cells.matrix from tests/cells/results -->",
        "",
        "For anyone who asks whether two features work together. "
        f"Generated from {results.cells} *cells* ({len(results.seeds)} seeds, {results.ranks[4]} with four ranks, "
        f"{len(results.families - {'unet'})} families of Transformers and a UNet): "
        "combinations of features, drawn so that every pair occurs, each trained for "
        f"{STEPS} steps against plain PyTorch in one process that sees the data of all ranks. Losses of every "
        "micro-batch, gradient norms, weights on every rank, the exported checkpoint, evaluations and resumed runs are "
        f"compared. {shares}: {results.outcomes['equal'] / total:.1%} are equal, {results.by_noise} of them within the "
        "difference that rounding alone causes in plain PyTorch, the rest within the tolerances below. "
        f"{len(results.covered)} pairs of features were drawn, "
        f"{sum(count > 1 for count in results.covered.values())} of them at least twice; of "
        f"{len(draw.pairs())} pairs random completion finds a config.",
        "",
        "`make cells N=200 SEED=7` draws and runs more; a failing cell is reduced and written as a script.",
        "",
        "## Matrix",
        "",
        "![matrix of features by features, colored by outcome](images/composability.svg)",
        "",
        "Green: all cells with both features were equal (darker: 1, 2, 4, 8 or more of them). Orange: some were "
        "refused, because of these two features or of a third; violet: all were. Grey: no config has both. White: not "
        "drawn. Hover over a square of the image for its counts.",
        "",
        "| feature | equal | refused | drawn with, of possible features | not yet with | refused twice, never equal |",
        "|---|---|---|---|---|---|",
        *_features(labels, results),
        "",
        "## Unsupported combinations",
        "",
        "| cells | error | example |",
        "|---|---|---|",
    ]
    for why, cells in sorted(results.refusals.items(), key=lambda each: -len(each[1])):
        lines.append(f"| {len(cells)} | {why.replace('|', '/')} | `{min(cells, key=len)}` |")
    lines += ["", "## Known failures", "", *_open(results)]
    lines += ["", "## Not covered", "", *textwrap.wrap(NOT_DRAWN, 118)]
    lines += ["", "## Tolerances", "", *textwrap.wrap(NEAR, 118), "", *_tolerances(), ""]
    return "\n".join(lines)


def possible() -> set[tuple[str, str]]:
    """Labels of features that some config has both of."""
    return {
        pair
        for first, second in draw.pairs()
        for pair in itertools.product(labels_of(dict([first])), labels_of(dict([second])))
    }


def _features(labels: list[str], results: Results) -> Iterator[str]:
    """Return table rows of the features with which each feature was drawn."""
    can = possible()
    for name in labels:
        pairs = {
            other: (min(name, other, key=labels.index), max(name, other, key=labels.index))
            for other in labels
        }
        squares = {other: results.squares[pair] for other, pair in pairs.items() if pair in can}
        refused = [other for other, square in squares.items() if square.refused > 1 and not square.equal]
        absent = [other for other, square in squares.items() if str(square) == "not drawn"]
        said = ", ".join(absent) if len(absent) <= FEW else f"{len(absent)} others"
        own = results.features[name]
        drawn = f"{len(squares) - len(absent)} of {len(squares)}"
        yield f"| {name} | {own.equal} | {own.refused} | {drawn} | {said} | {', '.join(refused)} |"


def image(labels: list[str], results: Results) -> str:
    """The matrix as SVG: one square for every two features, with its numbers as a tooltip."""
    can, size, left = possible(), 11, 150
    width = left + size * len(labels) + 110
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {size * len(labels) + 12}" '
        f'font-family="sans-serif" font-size="9"><rect width="100%" height="100%" fill="#fff"/>'
        f'<path d="M{left} 4h{size}L{width - 110} {size * len(labels) + 4}H{left}z" fill="#e4e4e4"/>'
        f'<defs><rect id="s" width="{size - 1}" height="{size - 1}"/></defs>'
    ]
    for row, down in enumerate(labels):
        y = 4 + size * row
        parts.append(f'<text x="{left - 4}" y="{y + 9}" text-anchor="end">{down}</text>')
        parts.append(f'<text x="{left + size * row + 4}" y="{y + 9}">{down}</text>')
        for column, across in enumerate(labels[:row]):
            square = results.squares[across, down]
            if (across, down) in can or str(square) != "not drawn":
                parts.append(
                    f'<use href="#s" x="{left + size * column}" y="{y}" fill="{square.color}">'
                    f"<title>{across} + {down}: {square}</title></use>"
                )
    return "\n".join([*parts, "</svg>", ""])


def _open(results: Results) -> list[str]:
    """Return lines for the cells that were neither equal nor refused."""
    lines = [f"- `{cell}` (seed {seed}): {what}" for cell, seed, what in results.faults]
    return lines or ["Nothing."]


def _tolerances() -> list[str]:
    rows = ["| feature | loss | norm | of a weight's movement |", "|---|---|---|---|"]
    for name, each in {
        **TOLERANCES,
        **{f"{name} {value}": each for (name, value), each in LOSSY.items()},
    }.items():
        rows.append(f"| {name} | {each.loss:g} | {each.norm:g} | {each.moved:g} |")
    return rows


def main() -> int:
    rows = [row for file in sorted(RESULTS.glob("*.jsonl")) for row in rows_of(file)]
    results = gathered(rows)
    PAGE.write_text(page(results))
    IMAGE.write_text(image(all_labels(), results))
    print(f"{PAGE}: {len(rows)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
