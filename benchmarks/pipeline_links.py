"""Step time of two pipeline stages against data parallelism over a slow link.

Two hosts that are network namespaces of this machine (links.py), one rank each. A pipeline sends activations of
micro-batches, data parallelism gradients of all weights once per step; both train the same micro-batches.

    python benchmarks/pipeline_links.py --mbits 100
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from jobs import Contender, Job, Spread, progress, ratios, round_robin, started
from links import Links, links_or_exit
from report import Report, common_arguments

HOSTS = 2
GOAL = 5.0  # x data parallelism, 50M, 100 Mbit/s


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Step time of pipelines and of data parallelism over a slow link.")
    parser.add_argument("--mbits", nargs="+", type=float, default=[100], help="rates of the link")
    parser.add_argument("--size", default="50M", help="of the GPT")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zero-bubble"])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.rounds, arguments.context = "tiny", 2, 64
        arguments.schedules = ["1f1b"]
    return arguments


def contenders(arguments: argparse.Namespace, links: Links) -> list[Contender]:
    common: dict[str, Any] = {
        "size": arguments.size,
        "precision": arguments.precision,
        "micro_batches": arguments.micro_batches,
        "batch": arguments.batch,
        "context": arguments.context,
    }
    kinds = {"data parallel": "data", **{f"2 stages, {each}": each for each in arguments.schedules}}
    return [
        Contender(
            name,
            "pipeline_gpt:PipelineRank",
            {"schedule": schedule, **common},
            ranks=HOSTS,
            place=partial(links.place, per_host=1),
        )
        for name, schedule in kinds.items()
    ]


def measure(jobs: dict[str, Job], links: Links, mbits: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds, and bytes that a host sends, of one step, by round."""
    links.limit(mbits)
    sent: dict[str, list[float]] = {name: [] for name in jobs}

    def seconds_per_step(job: Job) -> float:
        before = links.sent_bytes()
        seconds = max(job.call("run", steps=1))
        sent[job.name].append((links.sent_bytes() - before) / links.count)
        return seconds

    progress(f"{mbits:g} Mbit/s")
    seconds = round_robin(jobs, rounds, seconds_per_step)
    return {
        name: {"seconds": seconds[name], "sent_bytes": sent[name], "losses": losses_of(job)}
        for name, job in jobs.items()
    }


def losses_of(job: Job) -> list[float]:
    """Of the warm-up: means over the ranks."""
    every = [found["losses"] for found in job.call("describe")]
    return [sum(each) / len(each) for each in zip(*every, strict=True)]


def cells(name: str, data: dict[str, dict[str, Any]]) -> list[str]:
    found = data[name]
    return [
        name,
        f"{Spread.of(found['seconds']).median * 1e3:.0f}",
        f"{Spread.of(found['sent_bytes']).median / 1e6:.2f}",
        ratios(data["data parallel"]["seconds"], found["seconds"]).show(),
        f"{found['losses'][-1]:.5f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("pipeline_links", arguments)
    with links_or_exit(HOSTS) as links:
        rows = contenders(arguments, links)
        with started(rows) as jobs:
            for mbits in arguments.mbits:
                data = measure(jobs, links, mbits, arguments.rounds)
                report.table(
                    f"{arguments.size} GPT, {arguments.precision}, {HOSTS} hosts, {mbits:g} Mbit/s, "
                    f"{arguments.micro_batches} micro-batches of {arguments.batch} x {arguments.context} tokens, "
                    f"{arguments.rounds} rounds; goal >= {GOAL:g} for 50M and 100 Mbit/s",
                    ["", "ms/step", "MB sent per host", "x data parallel, median [min .. max]", "loss"],
                    [cells(row.name, data) for row in rows],
                )
                report.data[f"{mbits:g}"] = data
    report.save()


if __name__ == "__main__":
    main()
