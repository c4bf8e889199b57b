"""No operation costs more than in proportion to its size: counted calls of the short form of `benchmarks/growth.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

CONSTANT = {
    "ranks, stage 1": ["step: messages"],
    "sequences": ["a forward, waiting for 16: calls"],
    "tags": ["load the latest: calls"],
    "planned parameters": ["plan, stage 3: calls"],
}
"""By axis, what does not grow at all."""


def rows_of(axes: list[str]) -> dict[str, dict[str, str]]:
    """Last words of the rows of each table, by its name."""
    command = [sys.executable, str(BENCHMARKS / "growth.py"), "--quick", "--axes", *axes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, str]] = {}
    title = ""
    for line in done.stdout.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) == 1 and any(line.startswith(axis) for axis in axes):
            title = line
        elif title and ":" in cells[0] and len(cells) > 4:
            found.setdefault(title, {})[cells[0]] = cells[-1]
    return found


@pytest.mark.parametrize(
    "axes",
    [
        ["planned", "sequences", "config keys"],
        # A minute: hundreds of tensors, ranks and tags are made, trained and saved several times.
        pytest.param(["tensors", "parameters", "ranks", "tags", "optimizer groups"], marks=pytest.mark.slow),
    ],
    ids=["without an engine", "with an engine"],
)
def test_nothing_grows_faster_than_its_size(axes: list[str]) -> None:
    found = rows_of(axes)
    assert len(found) >= len(axes)
    counted = {
        (axis, row): end for axis, rows in found.items() for row, end in rows.items() if "CPU" not in row
    }
    assert not [place for place, end in counted.items() if end == "WORSE THAN LINEAR"]
    for axis, rows in CONSTANT.items():
        for row in rows:
            assert axis not in found or counted[axis, row] == "constant", (axis, row)


def test_an_exponent_is_that_of_what_grows() -> None:
    from growth import exponent

    sizes = [10, 40, 160]
    for power in (1, 1.5, 2):
        assert exponent(sizes, [700 + 3 * size**power for size in sizes]) == pytest.approx(power)
    assert exponent(sizes, [700, 700, 701]) == 0
    assert exponent(sizes, [700, 710, 900]) > 2
