"""``python -m tests.cells --count 200 --seed 7``: draws cells, runs them, appends JSON lines, prints a table.

Cells that are in the file already are not run again, so an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import pretended_gpu
from tests.cells import draw, shrink
from tests.cells.cell import Cell, parse
from tests.cells.run import OUTCOMES, Result, run_cell

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cells", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="how many cells of the seed")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing, and of the data")
    parser.add_argument("--results", type=Path, help="the file of JSON lines (results/seed_N.jsonl)")
    parser.add_argument(
        "--families", action="store_true", help="each tenth is a model of Transformers (installed?)"
    )
    parser.add_argument(
        "--rare", action="store_true", help="begin with the pairs that the results of other seeds have seldom"
    )
    parser.add_argument("--cell", help="run this one alone, such as 'ranks=2 stage=3 tier=nvme'")
    parser.add_argument("--minutes", type=float, help="begin no other cell after so many")
    parser.add_argument(
        "--gpu", action="store_true", help="on a pretended GPU (tests/pretended_gpu), over NCCL's groups"
    )
    parser.add_argument("--no-shrink", action="store_true", help="leave failing cells as they are")
    given = parser.parse_args()
    if given.gpu:
        _pretend_gpus()
    if given.cell is not None:
        return _one(parse(given.cell), given.seed)
    file = given.results or RESULTS / f"seed_{given.seed}.jsonl"
    others = [other for other in sorted(RESULTS.glob("*.jsonl")) if given.rare and other != file]
    before = [parse(row["cell"]) for other in others for row in rows_of(other)]
    drawn = draw.cells(given.seed, families=given.families, before=before)
    known = {row["cell"]: row for row in rows_of(file)}
    rows: list[dict[str, Any]] = []
    begun, ran = time.monotonic(), 0
    try:
        for number, cell in enumerate(itertools.islice(drawn, given.count)):
            if given.minutes is not None and time.monotonic() - begun > 60 * given.minutes:
                break
            if str(cell) not in known:
                row = _row(run_cell(cell, given.seed), given.seed, shrinks=not given.no_shrink)
                _append(file, row)
                known[str(cell)], ran = row, ran + 1
            rows.append(known[str(cell)])
            _progress(number + 1, given.count, rows)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on after {len(rows)} cells", file=sys.stderr)
    minutes = (time.monotonic() - begun) / 60
    print(table(rows), f"\n{ran} cells in {minutes:.1f} minutes: {ran / max(minutes, 1e-9):.1f} per minute")
    return int(any(row["outcome"] not in ("equal", "refused") for row in rows))


def _pretend_gpus() -> None:
    """Let ranks have a GPU; the oracle, in this process, stays on the host."""
    folder = Path(tempfile.mkdtemp(prefix="pretended_gpu_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[pretended_gpu.LIBRARY_VARIABLE] = str(pretended_gpu.build(folder))


def _one(cell: Cell, seed: int) -> int:
    result = run_cell(cell, seed)
    print(result.outcome, result.what, result.details, sep="\n")
    return int(result.is_fault)


def _row(result: Result, seed: int, *, shrinks: bool) -> dict[str, Any]:
    """Return the JSON row of a result; a failure includes its smallest cell and the script for it."""
    row = result.line(seed=seed)
    if shrinks and result.is_fault:
        small = shrink.shrunk(result.cell, lambda cell: run_cell(cell, seed).outcome == result.outcome)
        row |= {"smallest": str(small), "script": shrink.script(small, result.what, seed)}
    return row


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; the last one may be cut by whatever stopped the run."""
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _append(file: Path, row: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def _progress(done: int, count: int, rows: list[dict[str, Any]]) -> None:
    counts = collections.Counter(row["outcome"] for row in rows)
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    bar = "#" * (30 * done // count)
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"[{bar:30}] {done}/{count}  {said}", end=end, file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Outcomes with their numbers; then every fault and every kind of refusal."""
    counts = collections.Counter(row["outcome"] for row in rows)
    lines = ["", "| outcome | cells |", "|---|---|"]
    lines += [f"| {outcome} | {counts[outcome]} |" for outcome in OUTCOMES]
    covered = draw.coverage(parse(row["cell"]) for row in rows)
    lines.append(f"\npairs of features drawn: {len(covered)} of {len(draw.pairs())}")
    for row in rows:
        if row["outcome"] not in ("equal", "refused"):
            lines.append(f"{row['outcome']}: {row.get('smallest', row['cell'])}\n    {row['what'][:200]}")
            lines.append(row.get("script", ""))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
