"""TuningResults of the autotuner: records of its runs, the best one and the reasons, and the reports about them."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed.base.extras import install_hint
from deepspeed.base.logging import logger
from deepspeed.base.tables import padded
from deepspeed.tools.autotuning.arguments import LAUNCHER, arguments_for, start_command
from deepspeed.tools.autotuning.search import PLATEAU, Search
from deepspeed.tools.autotuning.space import Point

OPTIMAL_CONFIG, OPTIMAL_COMMAND = "ds_config_optimal.json", "cmd_optimal.txt"
SUMMARY, PICTURE = "summary.txt", "tuning.png"
UNITS = {"latency": "s per step", "throughput": "samples/s", "flops": "FLOPS"}


def better(metric: str, one: float | None, other: float | None) -> bool:
    """Tell whether the first value of the metric is better; no value is worse than any."""
    if one is None or other is None:
        return one is not None
    return one < other if metric == "latency" else one > other


class TuningResults:
    """The part of an autotuner that records runs and reports them."""

    args: Any
    rm: Any
    user_config: dict[str, Any]
    results_dir: str
    search: Search
    metric_name: str

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[dict[str, Any], float, int]]] = {}
        self.counts: dict[str, int] = {}
        """Number of experiments of each space, including failed ones."""
        self.optimal_ds_config: dict[str, Any] | None = None
        self.optimal_cmd: list[str] | None = None
        self.optimal_environment: dict[str, str] = {}
        self.reason = ""
        self.points: dict[str, Point] = {}
        """Points by experiment name."""
        self.refused: list[str] = []
        """Points that the memory plan ruled out."""
        self._began = time.monotonic()

    # Records --------------------------------------------------------------------------------------------------

    def update_records(
        self, space_name: str, exp: dict[str, Any], metric_val: float | None, num_exps: int
    ) -> None:
        """Record an experiment of a space, the ``num_exps``-th; ``metric_val`` None: it failed."""
        self.counts[space_name] = self.counts.get(space_name, 0) + 1
        if metric_val is not None:
            self.records.setdefault(space_name, []).append((exp, metric_val, num_exps))

    def get_best_space_record(self, space_name: str) -> Any:
        """Return (experiment, metric, number of experiments) of the best run in a space; None if there is none."""
        best = self._best_of(self.records.get(space_name, []))
        if best is None:
            return None
        return (*best[:2], self.counts.get(space_name, len(self.records[space_name])))

    def get_best_space_records(self) -> dict[str, Any]:
        """Return the best record of each space, and the overall best as "global"."""
        found = {space: self.get_best_space_record(space) for space in sorted(self.records)}
        best = self._best_of(found.values())
        if best is not None:
            found["global"] = (*best[:2], sum(record[2] for record in found.values()))
        return found

    def _best_of(self, records: Iterable[Any]) -> Any:
        """Return the best record, the first among equals; None if there is none."""
        best = None
        for record in records:
            if best is None or better(self.metric_name, record[1], best[1]):
                best = record
        return best

    # Best run -------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        best = self.get_best_space_records().get("global")
        if best is None:
            return
        exp = best[0]
        added = ("autotuning", "wall_clock_breakdown")
        self.optimal_ds_config = {key: value for key, value in exp["ds_config"].items() if key not in added}
        if "wall_clock_breakdown" in self.user_config:  # restore it: every run had it on
            self.optimal_ds_config["wall_clock_breakdown"] = self.user_config["wall_clock_breakdown"]
        self.optimal_environment = dict(exp.get("environment") or {})
        self.write_optimal_config()

    def write_optimal_config(self) -> None:
        """Write ``ds_config_optimal.json`` and ``cmd_optimal.txt`` to the results folder."""
        if self.optimal_ds_config is None:
            return
        folder = Path(self.results_dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / OPTIMAL_CONFIG
        path.write_text(json.dumps(self.optimal_ds_config, indent=2), encoding="utf-8")
        arguments = arguments_for(self.args.user_args, path, self.optimal_ds_config, self.rm.arg_mappings)
        command = start_command(self.args, self.rm.devices())
        self.optimal_cmd = [*command, *arguments]
        ours = command[: len(LAUNCHER)] == LAUNCHER
        readable = ["deepspeed", *self.optimal_cmd[len(LAUNCHER) :]] if ours else self.optimal_cmd
        set_first = [f"{name}={value}" for name, value in self.optimal_environment.items()]
        (folder / OPTIMAL_COMMAND).write_text(shlex.join([*set_first, *readable]) + "\n", encoding="utf-8")

    # Report ---------------------------------------------------------------------------------------------------

    def _unit(self) -> str:
        return UNITS[self.metric_name]

    def print_tuning_results(self) -> None:
        """Print the result tables and the reasons for the best run, write both to ``summary.txt``, and draw
        ``tuning.png``."""
        records = self.get_best_space_records()
        if not records:
            return
        Path(self.results_dir).mkdir(parents=True, exist_ok=True)
        rows = [
            (space, str(number), f"{value:.6g}", exp["name"])
            for space, (exp, value, number) in records.items()
        ]
        lines = table(("tuning_space", "num_experiments", "best_metric_val", "best_exp_name"), rows)
        lines += ["", *self._runs_table(), ""]
        total = timedelta(seconds=round(time.monotonic() - self._began))
        exp, value, number = records["global"]
        lines += [
            f"Tuning completed in {total}. Total number of experiments: {number}.",
            f"The best is {exp['name']} with {value:.6g} {self._unit()}"
            + (f": {self.reason}." if self.reason else "."),
            *self.why(),
            f"{Path(self.results_dir) / OPTIMAL_CONFIG} holds its config, {OPTIMAL_COMMAND} its command."
            + self._draw(),
        ]
        (Path(self.results_dir) / SUMMARY).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))

    def _measured(self) -> list[tuple[str, Point, float]]:
        """Return (name, point, metric) of every successful run, the best first."""
        found = {exp["name"]: value for records in self.records.values() for exp, value, _ in records}
        order = sorted(found.items(), key=lambda each: each[1], reverse=self.metric_name != "latency")
        known = [(name, self.points.get(name), value) for name, value in order]
        return [(name, point, value) for name, point, value in known if point in self.search.runs]

    def _runs_table(self) -> list[str]:
        """Return a table of the runs, with the time per sample by part of the step."""
        head = ("run", self._unit(), *"s/step ms/sample compute communication update data changes".split())
        rows = []
        for name, point, value in self._measured():
            seconds, each = self.search.runs[point][0], self._per_sample(point)
            text = ", ".join(choice.text() for choice in point.choices) or "-"
            times = [f"{ms:.3g}" for ms in each.values()]
            rows.append((name, f"{value:.5g}", f"{seconds:.4g}", f"{sum(each.values()):.3g}", *times, text))
        return table(head, rows)

    def _per_sample(self, point: Point) -> dict[str, float]:
        """Return a rank's milliseconds per sample, by part of the step."""
        samples = point.size * point.gas / point.model_ranks()
        return {
            part: seconds * 1e3 / samples for part, seconds in self.search.breakdown(point).as_dict().items()
        }

    def why(self) -> list[str]:
        """Return lines that compare the best run with the next ones, and that list what was not run, and why."""
        measured = self._measured()
        if not measured:
            return []
        (best, point, _), *others = measured
        lines = []
        mine = self._per_sample(point)
        for name, other, _ in others[:3]:
            theirs = self._per_sample(other)
            most = max(theirs, key=lambda part: theirs[part] - mine[part])
            lost = sum(theirs.values()) - sum(mine.values())
            if abs(lost) <= PLATEAU * sum(mine.values()):
                lines.append(f"  {name} is about as good: {lost:+.3g} ms per sample")
                continue
            lines.append(
                f"  {name} takes {lost:+.3g} ms per sample, most of it for {most}: {theirs[most]:.3g} ms instead of "
                f"{mine[most]:.3g} ms{_reason(most, point, other)}"
            )
        lines += [f"  not run: {text}" for text in (*self.refused, *self.search.not_run)]
        return [f"Why {best}:", *lines] if lines else []

    def _draw(self) -> str:
        """Draw the runs; return a sentence about the file, or an empty string."""
        rows = [(point.name(), point, value) for _, point, value in self._measured()]
        try:
            draw(Path(self.results_dir) / PICTURE, rows, self._unit(), self._per_sample)
        except ImportError:
            hint = install_hint("matplotlib", extra="demo")
            logger.info("autotuning: no plot without matplotlib (%s)", hint)
            return ""
        return f" {PICTURE} shows the runs."


def _reason(part: str, best: Point, other: Point) -> str:
    if part == "compute" and other.size > best.size:
        return " (larger micro-batches compute slower here)"
    if other.size * other.gas < best.size * best.gas and part != "data":
        mine, theirs = best.size * best.gas, other.size * other.gas
        return (
            f" (what a micro-batch or a step takes once is spread over {mine} samples, there over {theirs})"
        )
    if part == "communication" and other.stage != best.stage:
        return f" (stage {other.stage} sends, or waits for, more than stage {best.stage})"
    if part == "update" and other.stage != best.stage:
        return f" (the update of stage {best.stage} is {'shared by the ranks' if best.stage else 'whole on each rank'})"
    return ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    first, *rest = padded([head, *rows])
    return [f"| {' | '.join(cells)} |" for cells in (first, ["-" * len(cell) for cell in first], *rest)]


def draw(
    path: Path,
    rows: Sequence[tuple[str, Point, float]],
    unit: str,
    per_sample: Callable[[Point], dict[str, float]],
) -> None:
    """Draw each run's metric, and its time per sample by part, into a file. Needs matplotlib. ``rows``: (name, point,
    metric), the best first; ``per_sample``: returns the milliseconds per sample by part of the step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
