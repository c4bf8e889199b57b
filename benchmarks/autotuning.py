"""The autotuner on the GPT, two ranks, under a limit of memory, against every config of a small grid.

The grid is what an exhaustive search would run: each stage with micro-batches of powers of two as far as they fit. Its
configs are measured by the same trials as the autotuner's, without a limit, and those whose measured peak was above the
limit do not count. The autotuner itself is given nothing but the script and the limit. With `--folder`, what has ended
is kept there, and the same command goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import FOLDER
from report import Report, common_arguments

GOAL = 0.95
GIB = 1 << 30
MODEL_INFO = "profile_model_info"


def tune(folder: Path, arguments: Any, section: dict[str, Any], stages: Any = "all") -> tuple[float, str]:
    """Run the command; returns its seconds and what it printed. One that has ended in this folder is not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "ended.json"
    if kept.exists():
        seconds, out = json.loads(kept.read_text())
        return seconds, out
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stages},
        "autotuning": {
            "enabled": True,
            "start_profile_step": 2,
            "end_profile_step": arguments.steps,
            **section,
        },
    }
    if "train_micro_batch_size_per_gpu" in section:
        config["train_micro_batch_size_per_gpu"] = config["autotuning"].pop("train_micro_batch_size_per_gpu")
    (folder / "ds.json").write_text(json.dumps(config))
    command = [
        sys.executable, "-m", "deepspeed.launcher.runner", "--autotuning", "tune", "--num_gpus", "2",
        str(FOLDER / "autotuning_job.py"), "--size", arguments.size, "--context", str(arguments.context),
        "--steps", str(arguments.steps + 2), "--deepspeed", "--deepspeed_config", "ds.json",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    seconds = time.monotonic() - began
    kept.write_text(json.dumps([seconds, done.stdout]))
    return seconds, done.stdout


def runs_of(folder: Path) -> dict[str, dict[str, Any]]:
    """What each run of a search measured, with its config and the bytes that it took beside the libraries."""
    results = folder / "autotuning_results"
    info = json.loads((results / MODEL_INFO / "model_info.json").read_text())
    found = {}
    for file in results.glob("*/metrics.json"):
        metrics = json.loads(file.read_text())
        config = json.loads((file.parent / "ds_config.json").read_text())
        taken = metrics["peak_memory"] - info["resident"]
        found[file.parent.name] = {**metrics, "config": config, "taken": taken}
    return found


def shown(config: dict[str, Any]) -> str:
    return f"stage {config['zero_optimization']['stage']}, {config['train_micro_batch_size_per_gpu']} samples"


def main(argv: Sequence[str] | None = None) -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--size", default="10M")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--limits", type=float, nargs="+", default=[1.0, 4.0], help="GiB of each rank")
    parser.add_argument(
        "--grid", type=int, nargs="+", default=[1, 4, 8, 16], help="micro-batches of the grid"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where runs are kept; default: nowhere")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.grid, arguments.limits = "tiny", [1, 4], [1.0]
    report = Report("autotuning", arguments)
    with tempfile.TemporaryDirectory() as temporary:
        there = arguments.folder or Path(temporary)
        most = max(arguments.grid)
        rows, details = [], []
        tuned = {}
        for limit in arguments.limits:
            folder = there / f"limit{limit:g}"
            section = {"memory_per_rank": int(limit * GIB), "max_train_micro_batch_size_per_gpu": most}
            seconds, out = tune(folder, arguments, section)
            tuned[limit] = (
                seconds,
                runs_of(folder),
                json.loads((folder / "autotuning_results" / "ds_config_optimal.json").read_text()),
            )
            details.append((limit, out))
        folder = there / "grid"
        section = {"tuner_type": "gridsearch", "tuner_num_trials": 100, "tuner_early_stopping": 100,
                   "train_micro_batch_size_per_gpu": arguments.grid}  # fmt: skip
        grid_seconds, _ = tune(folder, arguments, section)
        grid = {name: run for name, run in runs_of(folder).items() if name != MODEL_INFO}
        for limit in arguments.limits:
            seconds, runs, best = tuned[limit]
            fitting = {name: run for name, run in grid.items() if run["taken"] <= limit * GIB}
            top = max(fitting.values(), key=lambda run: run["throughput"])
            mine = max(runs.values(), key=lambda run: run["throughput"])
            rows.append(
                [
                    f"{limit:g} GiB",
                    shown(best),
                    f"{mine['throughput']:.1f}",
                    shown(top["config"]),
                    f"{top['throughput']:.1f}",
                    f"{mine['throughput'] / top['throughput']:.3f}",
                    f"{max(0, len(runs) - 2)}",
                    f"{max(run['taken'] for run in runs.values()) / GIB:.2f}",
                    f"{seconds:.1f}",
                ]
            )
    head = ["memory of a rank", "autotuner chose", "samples/s", "best of the grid", "samples/s", "ratio",
            "runs beyond 2", "most GiB taken", "seconds"]  # fmt: skip
    title = f"{arguments.size} GPT, context {arguments.context}, 2 ranks; goal: ratio >= {GOAL}, <= 3 runs, <= 60 s"
    report.table(title, head, rows)
    report.line(f"the grid: {len(grid)} runs in {grid_seconds:.1f} s")
    measured = sorted(grid.values(), key=lambda run: -run["throughput"])
    report.table(
        "the grid",
        ["config", "samples/s", "GiB taken"],
        [[shown(r["config"]), f"{r['throughput']:.1f}", f"{r['taken'] / GIB:.2f}"] for r in measured],
    )
    for limit, out in details:
        report.line()
        report.line(f"what the autotuner printed with {limit:g} GiB:")
        for line in out.splitlines():
            report.line(f"  {line}".rstrip())
    report.data["grid"] = {
        name: {k: v for k, v in run.items() if k != "config"} for name, run in grid.items()
    }
    report.save()


if __name__ == "__main__":
    main()
