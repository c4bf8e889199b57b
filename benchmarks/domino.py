"""Step time of Domino's transformer over a link between two tensor-parallel ranks, with and without overlap.

Two hosts that are network namespaces of this machine (links.py), one rank each. "no overlap" is the same model whose
batch goes through all layers in one piece: each sum is waited for.

    python benchmarks/domino.py --mbits 1000
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
SCHEDULES = {"no overlap": "whole", "Domino, in each layer": "layer", "Domino": "halves"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Step time of Domino over a slow link.")
    parser.add_argument("--mbits", nargs="+", type=float, default=[1000], help="rates of the link")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.hidden, arguments.layers, arguments.batch, arguments.rounds = 64, 2, 4, 2
    return arguments


def contenders(arguments: argparse.Namespace, links: Links) -> list[Contender]:
    common = {name: getattr(arguments, name) for name in ("hidden", "layers", "batch", "context")}
    return [
        Contender(
            name,
            "domino_rank:DominoRank",
            {"schedule": schedule, **common},
            ranks=HOSTS,
            place=partial(links.place, per_host=1),
        )
        for name, schedule in SCHEDULES.items()
    ]


def measure(jobs: dict[str, Job], links: Links, mbits: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of a step, by round, and what the loss is then."""
    links.limit(mbits)
    progress(f"{mbits:g} Mbit/s")
    seconds = round_robin(jobs, rounds, lambda job: max(job.call("run", steps=1)))
    return {
        name: {"seconds": seconds[name], "loss": job.call("describe")[0]["loss"]}
        for name, job in jobs.items()
    }


def cells(name: str, data: dict[str, dict[str, Any]]) -> list[str]:
    found = data[name]
    return [
        name,
        f"{Spread.of(found['seconds']).median * 1e3:.0f}",
        ratios(data["no overlap"]["seconds"], found["seconds"]).show(),
        f"{found['loss']:.6f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("domino", arguments)
    with links_or_exit(HOSTS) as links:
        rows = contenders(arguments, links)
        with started(rows) as jobs:
            for mbits in arguments.mbits:
                data = measure(jobs, links, mbits, arguments.rounds)
                report.table(
                    f"{arguments.layers} layers of {arguments.hidden}, fp32, {HOSTS} hosts, {mbits:g} Mbit/s, "
                    f"{arguments.batch} x {arguments.context} tokens, {arguments.rounds} rounds",
                    ["", "ms/step", "x no overlap, median [min .. max]", "loss"],
                    [cells(row.name, data) for row in rows],
                )
                report.data[f"{mbits:g}"] = data
    report.save()


if __name__ == "__main__":
    main()
