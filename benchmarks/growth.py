"""What an operation costs as one size grows: Python calls, CPU time, files and messages, and the exponent of each.

A cost `a + b * size^k` is taken from three sizes in equal ratios: their differences have the exponent `k` whatever `a`
is. Calls of Python's and C's functions are counted with `sys.setprofile`, the same on every machine; CPU time also
shows what a call of C does inside. Nothing is moved between ranks: all but one of the axis `ranks` are pretended, as in
`scale.py`.

    python benchmarks/growth.py --save cpu2
    python benchmarks/growth.py --axes tensors tags
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from growth_axes import AXES
from jobs import progress
from report import Report, common_arguments

NOISE_CALLS = 0.05
"""A cost that grows by less than this share of itself over the whole range does not grow."""
LINEAR, LINEAR_CPU = 1.15, 1.35
"""An exponent up to here is that of a linear cost: a sort, or a table that doubles, adds a little; CPU time also has
its noise, and caches that a larger size does not fit."""
CPU_SHOWS = 0.02
"""Seconds below which CPU time says nothing."""
PADDING = "64 bytes per rank in each bucket, once its data are fewer"
DERIVED = {
    "optimizer groups, initialize": "torch compares each group with all before it",
    "ranks, stage 1, step: KB": PADDING,
    "ranks, stage 3, step: KB": PADDING,
}
"""Costs that may grow faster than their size, and why."""


@dataclass(slots=True)
class Cost:
    """Of one operation at one size."""

    calls: int = 0
    seconds: float = math.inf  # not measured
    counted: dict[str, float] = field(default_factory=dict)
    """What the operation counts itself: bytes, files, messages."""


class Meter:
    """Measures operations by name."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}

    @contextmanager
    def of(self, operation: str) -> Iterator[Cost]:
        """Count calls in the block, of this thread. CPU time is taken with ``again``: counting takes most of it."""
        cost = self.costs.setdefault(operation, Cost())
        with counted_calls(cost):
            yield cost

    def again(self, operation: str, run: Callable[[], Any]) -> Any:
        """CPU seconds of a run without counting; of several, those of the fastest."""
        gc.collect()
        gc.disable()
        begin = time.process_time()
        try:
            return run()
        finally:
            cost = self.costs.setdefault(operation, Cost())
            cost.seconds = min(cost.seconds, time.process_time() - begin)
            gc.enable()


@contextmanager
def counted_calls(cost: Cost) -> Iterator[None]:
    """Add the calls of Python's and C's functions in the block to ``cost``."""

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    calls = 0
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        cost.calls += calls


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Of the part that grows, from the last three sizes; 0 if hardly anything does."""
    first, middle, last = costs[-3:]
    if last - first <= NOISE_CALLS * max(first, 1e-9) or last <= middle:
        return 0.0
    ratio = math.log(sizes[-1] / sizes[-2])
    if middle <= first:
        return math.log(max(last, 1e-9) / max(middle, 1e-9)) / ratio
    return max(0.0, math.log((last - middle) / (middle - first)) / ratio)


def verdict(row: str, power: float) -> str:
    if power > (LINEAR_CPU if row.endswith("CPU ms") else LINEAR):
        return next((why for name, why in DERIVED.items() if row.startswith(name)), "WORSE THAN LINEAR")
    return "constant" if power == 0 else "at most linear"


def measure(name: str, quick: bool) -> tuple[tuple[int, ...], list[dict[str, Cost]]]:
    """Costs of every operation of an axis, by size."""
    axis = AXES[name]
    sizes = axis.quick if quick else axis.sizes
    found = []
    for size in (sizes[0], *sizes):  # the first run of a process imports and caches
        progress(f"{name}: {size:,}")
        meter = Meter()
        with contextlib.redirect_stdout(
            io.StringIO()
        ):  # what engines say as they start: making it is part of the cost
            axis.run(size, meter)
        found.append(meter.costs)
    return sizes, found[1:]


def rows_of(axis: str, sizes: Sequence[int], found: Sequence[dict[str, Cost]]) -> list[list[str]]:
    rows = []
    for operation in found[0]:
        costs = [each[operation] for each in found]
        columns = {
            "calls": [float(cost.calls) for cost in costs],
            "CPU ms": [cost.seconds * 1e3 for cost in costs],
        }
        columns |= {what: [cost.counted[what] for cost in costs] for what in costs[0].counted}
        for what, values in columns.items():
            if what == "CPU ms" and not CPU_SHOWS * 1e3 <= values[-1] < math.inf:
                continue
            power = exponent(sizes, values)
            cells = [f"{value:,.0f}" if what != "CPU ms" else f"{value:,.1f}" for value in values]
            row = f"{operation}: {what}"
            rows.append([row, *cells, f"{power:.2f}", verdict(f"{axis}, {row}", power)])
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Costs by size, and their exponents.")
    parser.add_argument(
        "--axes", nargs="+", default=list(AXES), metavar="AXIS", help=f"some of: {', '.join(AXES)}"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Report:
    arguments = parse(argv)
    report = Report("growth", arguments)
    report.data["axes"] = {}
    torch.set_num_threads(1)
    for name in [axis for axis in AXES if any(axis.startswith(asked) for asked in arguments.axes)]:
        sizes, found = measure(name, arguments.quick)
        rows = rows_of(name, sizes, found)
        report.data["axes"][name] = {"sizes": sizes, "rows": rows}
        report.table(name, ["", *(f"{size:,}" for size in sizes), "exponent", ""], rows)
    report.save()
    return report


if __name__ == "__main__":
    main()
