"""What the live page and its record (`monitor.live`) add to a step, with a browser that asks every second.

Two jobs of two ranks are alive at once, one with `monitor.live` and one without; the driver goes round them, block by
block, and takes the ratio within each round. The threads of the one also run while the other is measured, so the
time of the processors is shown as well: it is that of rank 0 with all of its threads, the page's included; and what
those threads alone take of a processor, which neighbours on the machine do not change.

    python benchmarks/live.py --save two_ranks
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence

from jobs import Contender, Job, Spread, ratios, round_robin, started
from report import Report, common_arguments

GOAL = 1.005
OFF, ON = "without", "with monitor.live"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Step time with the live page, relative to none.")
    parser.add_argument("--size", default="10M", choices=["tiny", "10M", "50M"])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.rounds, arguments.steps = "tiny", 3, 20
    return arguments


def contenders(size: str, folder: str) -> list[Contender]:
    live = {"monitor": {"live": {"folder": f"{folder}/live", "port": 0}}}
    rows = []
    for name, config in ((OFF, {}), (ON, live)):
        options = {"system": "engine", "model": size, "precision": "fp32", "stage": 2, "config": config}
        rows.append(Contender(name, "trainers:Trainer", options, ranks=2))
    return rows


def visit(folder: str, end: threading.Event, seen: list[int]) -> None:
    """What a browser does: ask for what is new, every second."""
    epoch = number = -1
    while not end.wait(1.0):
        for path in glob.glob(f"{folder}/jobs/*.json"):
            with open(path, encoding="utf-8") as file:
                address = json.load(file)["address"]
            url = f"{address}/data?epoch={epoch}&since={number}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                told = json.load(answer)
            epoch, number = told["epoch"], told["number"]
            seen.append(len(told["rows"]))


def of_threads(before: dict[str, float], after: dict[str, float], seconds: float) -> tuple[float, float]:
    """Shares of a processor: of the page's threads that live all the time, and of those that came and went (one for
    each request)."""
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    lasting = sum(each for name, each in spent.items() if name.startswith("deepspeed live"))
    gone = spent["process"] - sum(each for name, each in spent.items() if name != "process")
    return lasting / seconds, max(0.0, gone) / seconds


def milliseconds(samples: Sequence[float]) -> str:
    return f"{1e3 * Spread.of(samples).median:.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("live", arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DEEPSPEED_RUNTIME_DIR"] = f"{folder}/jobs"
        end, seen = threading.Event(), []
        browser = threading.Thread(target=visit, args=(folder, end, seen), daemon=True)
        with started(contenders(arguments.size, folder)) as jobs:
            browser.start()
            cpu: dict[str, list[float]] = {OFF: [], ON: []}

            def measure(job: Job) -> float:
                seconds = job.call("run", steps=arguments.steps)[0]
                cpu[job.name].append(job.call("cpu")[0])
                return seconds

            began, before = time.perf_counter(), jobs[ON].call("cpu_of_threads")
            seconds = round_robin(jobs, arguments.rounds, measure)
            took, after = time.perf_counter() - began, jobs[ON].call("cpu_of_threads")
            end.set()
            browser.join()
        size = os.path.getsize(f"{folder}/live/history.jsonl")
    ratio, of_cpu = ratios(seconds[ON], seconds[OFF]), ratios(cpu[ON], cpu[OFF])
    report.table(
        f"{arguments.size} GPT, fp32, stage 2, two ranks, {arguments.rounds} rounds of {arguments.steps} steps",
        ["", "ms/step", "ratio, median [min .. max]", "goal", "CPU ms of rank 0", "ratio"],
        [
            [OFF, milliseconds(seconds[OFF]), "", "", milliseconds(cpu[OFF]), ""],
            [
                ON,
                milliseconds(seconds[ON]),
                ratio.show("{:.4f}"),
                f"<= {GOAL}",
                milliseconds(cpu[ON]),
                of_cpu.show("{:.4f}"),
            ],
        ],
    )
    report.line(f"the browser got {sum(seen)} rows in {len(seen)} answers; the record has {size} bytes")
    for rank, (first, last) in enumerate(zip(before, after, strict=True)):
        lasting, gone = of_threads(first, last, took)
        report.line(
            f"rank {rank}: the page's threads take {lasting:.3%} of a processor"
            + (f", the answers to the browser {gone:.3%}" if rank == 0 else "")
        )
    report.data |= {"seconds": seconds, "cpu_seconds": cpu, "record_bytes": size}
    report.save()


if __name__ == "__main__":
    main()
