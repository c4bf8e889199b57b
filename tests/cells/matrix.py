"""Writes ``docs/composability.md`` from the committed results: ``python -m tests.cells.matrix``."""

from __future__ import annotations

import collections
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cells import draw
from tests.cells.__main__ import RESULTS, rows_of
from tests.cells.cell import CHOICES, FAMILIES, STEPS, parse
from tests.cells.oracle import LOSSY, TOLERANCES

PAGE = Path(__file__).parents[2] / "docs" / "composability.md"
MATRIX = {
    "axes": ("tp", "sp", "pp", "ep"),
    "stage": (1, 2, 3),
    "shards": CHOICES["shards"][1:],
    "tier": CHOICES["tier"][1:],
    "precision": CHOICES["precision"][1:],
    "optimizer": CHOICES["optimizer"][1:],
    "accumulation": (3,),
    "clip": (True,),
    "wire": CHOICES["wire"][1:],
    "recompute": CHOICES["recompute"][1:],
    "parameters": CHOICES["parameters"][1:],
    "data": CHOICES["data"][1:],
    "resume": CHOICES["resume"][1:],
    "order": CHOICES["order"][1:],
    "compile": CHOICES["compile"][1:],
    "lora": (True,),
    "lengths": CHOICES["lengths"][1:],
    "layer_drop": (True,),
    "compression": CHOICES["compression"][1:],
    "fp8": (True,),
    "attention": CHOICES["attention"][1:],
    "generate": (True,),
    "token_drop": (True,),
}
"""The rows and columns; an axis stands for every combination that has it."""

NOT_DRAWN = (
    "Models of Transformers have the features that do not change their layers. What a cell cannot say yet: more than 4 ranks; two axes on 4 ranks together with "
    "a third; compiled code (torch.compile is drawn with the backends that trace and do not generate code); "
    "learned masks, ranges from statistics and MoQ; devices other than CPUs. Signs of the 1-bit optimizers travel "
    "without loss here, so that their update is a formula of the gradients. Quantized weights (qwZ), quantized "
    "gradients (qgZ), the int8 codec and sums in bf16 are compared with formulas of their own in fp32 cells with "
    "data parallelism alone; elsewhere with training that rounds nothing, within a wider limit."
)


@dataclass
class Square:
    equal: int = 0
    refused: int = 0
    faults: int = 0

    def __str__(self) -> str:
        if self.faults:
            return f"**{self.equal}, {self.faults} wrong**"
        if self.refused:
            return f"{self.equal}, {self.refused} refused" if self.equal else "refused"
        return str(self.equal or "")


@dataclass
class Results:
    cells: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    squares: dict[tuple[str, str], Square] = field(default_factory=lambda: collections.defaultdict(Square))
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
        for at, first in enumerate(labels):
            for second in labels[at + 1 :]:
                square = results.squares[first, second]
                kind = row["outcome"] if row["outcome"] in ("equal", "refused") else "faults"
                setattr(square, kind, getattr(square, kind) + 1)
        if row["outcome"] == "refused":
            results.refusals[reason(row["what"])].append(row["cell"])
        elif row["outcome"] != "equal":
            results.faults.append((row["cell"], row.get("seed", 0), reason(row["what"])))
    return results


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
    labels = [label(name, value) for name, values in MATRIX.items() for value in values]
    lines = [
        "# What may be combined",
        "",
        "<!-- written by python -m tests.cells.matrix from tests/cells/results -->",
        "",
        f"Generated from {results.cells} *cells* ({len(results.seeds)} seeds, {results.ranks[4]} with four ranks, "
        f"{len(results.families)} families of Transformers): "
        "combinations of features, drawn so that every pair has its turn, each trained for "
        f"{STEPS} steps against plain PyTorch in one process that sees the data of all ranks. Losses of every "
        "micro-batch, gradient norms, weights on every rank, the exported checkpoint, evaluations and resumed runs are "
        f"compared. {shares}: {results.outcomes['equal'] / total:.1%} are equal. Of {len(draw.pairs())} pairs that a "
        f"config can express, {len(results.covered)} were drawn, "
        f"{sum(count > 1 for count in results.covered.values())} at least twice.",
        "",
        "`make cells N=200 SEED=7` draws and runs more; a cell that fails is made small and written as a script.",
        "",
        "## The matrix",
        "",
        "The number of equal cells that have both features; refused ones are counted beside. Empty: not drawn, or "
        "impossible.",
        "",
        *_matrix(labels, results),
        "",
        "## Refusals",
        "",
        "| cells | what the error says | one of them |",
        "|---|---|---|",
    ]
    for why, cells in sorted(results.refusals.items(), key=lambda each: -len(each[1])):
        lines.append(f"| {len(cells)} | {why.replace('|', '/')} | `{min(cells, key=len)}` |")
    lines += ["", "## Open", "", *_open(results)]
    lines += ["", "## Not drawn", "", *textwrap.wrap(NOT_DRAWN, 118)]
    lines += ["", "## How near is equal", "", *_tolerances(), ""]
    return "\n".join(lines)


def _matrix(labels: list[str], results: Results) -> list[str]:
    """Features down, numbers of features across: a table with 47 named columns cannot be read."""
    lines = ["| | | " + " | ".join(str(number + 1) for number in range(len(labels) - 1)) + " |"]
    lines.append("|" + "---|" * (len(labels) + 1))
    for at, down in enumerate(labels):
        squares = [str(results.squares[each, down]) if each in labels[:at] else "" for each in labels[:-1]]
        lines.append(f"| {at + 1} | {down} | " + " | ".join(squares) + " |")
    return lines


def _open(results: Results) -> list[str]:
    """What ended otherwise than equal or refused."""
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
    PAGE.write_text(page(gathered(rows)))
    print(f"{PAGE}: {len(rows)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
