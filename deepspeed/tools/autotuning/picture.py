"""Plot of the runs: the metric of each, and its time per sample by part. Importing this needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deepspeed.tools.autotuning.space import Point


def draw(
    path: Path,
    rows: Sequence[tuple[str, Point, float]],
    unit: str,
    per_sample: Callable[[Point], dict[str, float]],
) -> None:
    """Draw the runs into a file. ``rows``: (name, point, metric), the best first; ``per_sample``: returns the
    milliseconds per sample by part of the step."""
    figure = Figure(figsize=(11, 0.5 * len(rows) + 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [name for name, _, _ in rows]
    places = list(range(len(rows)))[::-1]
    bars = left.barh(places, [value for _, _, value in rows], color="#7a9cc6")
    if bars:
        bars[0].set_color("#2e7d32")
    left.bar_label(bars, fmt="%.4g", padding=3)
    left.set_yticks(places, names)
    left.set_xlabel(unit)
    left.margins(x=0.15)
    starts = [0.0] * len(rows)
    parts = [per_sample(point) for _, point, _ in rows]
    for part, color in zip(
        parts[0] if parts else (), ("#4c72b0", "#c44e52", "#ccb974", "#999999"), strict=False
    ):
        widths = [each[part] for each in parts]
        right.barh(places, widths, left=starts, label=part, color=color)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    right.set_xlabel("ms per sample of a rank")
    figure.legend(loc="outside upper right", ncols=4)
    figure.savefig(path, dpi=110)
