"""Step time over slow links: ZeRO++ against plain ZeRO-3, 1-bit and 0/1 Adam against Adam, 1-bit LAMB against LAMB.

Two hosts that are network namespaces of this machine (links.py), with gloo between them and shared memory within. Ranks
start and warm up without a limit, then each rate is set and measured. What crosses between hosts is counted by their
network interfaces, headers included.

    python benchmarks/slow_links.py --save cpu2
    python benchmarks/slow_links.py --mbits 100 --sizes 50M --ranks 2
    python benchmarks/slow_links.py --mbits 100 --sizes 50M --ranks 2 --rows Adam --save 50M
    python benchmarks/slow_links.py --mbits 100 --sizes 50M --ranks 2 --rows "1-bit Adam" --save 50M

With --peer, its plain rows as well. With --rows, a call measures these (the peer's are called "peer") and adds them
to what --save has of other rows: a comparison in parts, where all of it would take too long. Then the time to plain is
that of medians, and minutes lie between the two.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobs import OURS, Contender, Job, Spread, described, progress, ratios, round_robin, started
from links import Links, links_or_exit
from report import RESULTS, Report, common_arguments
from trainers import BETAS, LEARNING_RATE, WEIGHT_DECAY, Trainer

HOSTS = 2
FREEZE = 4  # updates of warm-up of the 1-bit optimizers
MAX_STEPS = 4  # of a measurement


@dataclass(frozen=True)
class Row(Contender):
    """``plain``: the row that it is compared with; ``period``: steps after which it repeats what it sends."""

    plain: str = ""
    period: int = 1


CODERS = ("encode", "decode", "encode_largest", "decode_largest")


class CodingTrainer(Trainer):
    """Counts the seconds in the codecs' native functions."""

    def __init__(self, **options: Any) -> None:
        self._coding = 0.0
        if options["system"] == "engine":
            self._count()
        super().__init__(**options)

    def _count(self) -> None:
        try:
            from deepspeed.ops.formats import host_codecs as packets
        except ImportError:  # a peer has none
            return
        for name in CODERS:
            setattr(packets, name, self._watched(getattr(packets, name)))

    def _watched(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._coding += time.perf_counter() - begin

        return call

    def run(self, steps: int) -> float:
        self._coding = 0.0
        self._steps = steps
        return super().run(steps)

    def coding(self) -> float:
        """Seconds per step of the last run."""
        return self._coding / self._steps


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Step time over slow links, and bytes that cross them.")
    parser.add_argument("--mbits", nargs="+", type=float, default=[20, 100, 1000], help="rates of the links")
    parser.add_argument("--sizes", nargs="+", default=["10M"], choices=["tiny", "10M", "50M"])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, default=1, help="ranks per host")
    parser.add_argument("--context", type=int, default=256, help="tokens of a rank and step")
    parser.add_argument("--rows", nargs="+", help="only these (names up to a comma); default: all")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all rows, for each rate")
    parser.add_argument(
        "--local-steps", type=int, default=8, help="0/1 Adam: steps from exchange to exchange"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.mbits, arguments.sizes, arguments.rounds, arguments.local_steps = [100], ["tiny"], 2, 4
    return arguments


def optimizer_of(kind: str, **params: Any) -> dict[str, Any]:
    common = {"lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}
    return {"optimizer": {"type": kind, "params": {**common, **params}}}


def contenders(arguments: argparse.Namespace, size: str, links: Links) -> list[Row]:
    local, per_host = arguments.local_steps, arguments.ranks
    zeropp: dict[str, Any] = {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        **({"zero_hpz_partition_size": per_host} if per_host > 1 else {}),
    }
    zero_one = optimizer_of(
        "ZeroOneAdam", var_freeze_step=FREEZE, local_step_scaler=1, local_step_clipper=local
    )
    zeropp4 = {**zeropp, "zero_quantized_weights_bits": 4}
    rows: list[tuple[str, int, dict[str, Any], str, int]] = [
        ("Adam", 0, {}, "Adam", 1),
        ("1-bit Adam", 0, optimizer_of("OneBitAdam", freeze_step=FREEZE), "Adam", 1),
        (f"0/1 Adam, every {local} steps", 0, zero_one, "Adam", local),
        ("LAMB", 0, optimizer_of("Lamb"), "LAMB", 1),
        ("1-bit LAMB", 0, optimizer_of("OneBitLamb", freeze_step=FREEZE), "LAMB", 1),
        ("ZeRO-3", 3, {}, "ZeRO-3", 1),
        ("ZeRO-3 with ZeRO++", 3, {"zero_optimization": zeropp}, "ZeRO-3", 1),
        ("ZeRO++, 4-bit weights", 3, {"zero_optimization": zeropp4}, "ZeRO-3", 1),
    ]
    if arguments.peer:
        rows += [("peer, Adam", 0, {}, "Adam", 1), ("peer, ZeRO-3", 3, {}, "ZeRO-3", 1)]
    options: dict[str, Any] = {"system": "engine", "model": size, "precision": arguments.precision}
    options["context"] = arguments.context
    # By then the interval of 0/1 Adam is as long as it gets; all rows show their loss after as many steps.
    options["warmup"] = FREEZE + max(local.bit_length(), 8)
    return [
        Row(
            name,
            "slow_links:CodingTrainer",
            {**options, "stage": stage, "config": config},
            ranks=HOSTS * per_host,
            python=arguments.peer if name.startswith("peer") else OURS,
            plain=plain,
            period=period,
            place=partial(links.place, per_host=per_host),
        )
        for name, stage, config, plain, period in rows
    ]


def measure(
    rows: Sequence[Row], jobs: dict[str, Job], links: Links, mbits: float, rounds: int
) -> dict[str, dict[str, Any]]:
    """Seconds, processor seconds of a rank and bytes that a host sends, all per step, of each round."""
    links.limit(mbits)
    usual = max(1, min(MAX_STEPS, int(mbits // 50)))
    steps = {row.name: max(row.period, usual // row.period * row.period) for row in rows}
    sent: dict[str, list[float]] = {row.name: [] for row in rows}
    cpu: dict[str, list[float]] = {row.name: [] for row in rows}
    coding: dict[str, list[float]] = {row.name: [] for row in rows}

    def seconds_per_step(job: Job) -> float:
        before = links.sent_bytes()
        seconds = max(job.call("run", steps=steps[job.name]))
        sent[job.name].append((links.sent_bytes() - before) / links.count / steps[job.name])
        cpu[job.name].append(max(job.call("cpu")))
        coding[job.name].append(max(job.call("coding")))
        return seconds

    progress(f"{mbits:g} Mbit/s")
    seconds = round_robin(jobs, rounds, seconds_per_step)
    return {
        name: {
            "seconds": seconds[name],
            "cpu_seconds": cpu[name],
            "coding_seconds": coding[name],
            "sent_bytes": sent[name],
            "steps": steps[name],
            **described(job),
        }
        for name, job in jobs.items()
    }


def cells(row: Row, data: dict[str, dict[str, Any]], mbits: float) -> list[str]:
    found, plain = data[row.name], data.get(row.plain)
    sent = Spread.of(found["sent_bytes"]).median
    return [
        row.name,
        f"{Spread.of(found['seconds']).median * 1e3:.1f}",
        f"{Spread.of(found['cpu_seconds']).median * 1e3:.1f}",
        share_of_coding(found),
        f"{sent / found['parameters']:.3f}",
        f"{sent * 8 / mbits / 1e3:.1f}",
        compared(found, plain) if plain else "",
        row.plain,
        f"{found['losses'][-1]:.4f}",
    ]


def share_of_coding(found: dict[str, Any]) -> str:
    """Of the step; measured by calls of some time ago, unknown."""
    if "coding_seconds" not in found:
        return ""
    return f"{Spread.of(found['coding_seconds']).median / Spread.of(found['seconds']).median:.1%}"


def compared(found: dict[str, Any], plain: dict[str, Any]) -> str:
    """Within rounds, or, where they were measured in different calls, of medians."""
    if found["call"] == plain["call"]:
        return ratios(found["seconds"], plain["seconds"]).show()
    return f"{Spread.of(found['seconds']).median / Spread.of(plain['seconds']).median:.3f}"


def measured_before(arguments: argparse.Namespace, key: str) -> dict[str, dict[str, Any]]:
    """By row, what earlier calls with ``--rows`` have saved."""
    path = RESULTS / f"slow_links_{arguments.save}.json"
    if not arguments.rows or not arguments.save or not path.exists():
        return {}
    return json.loads(path.read_text()).get(key, {})


def compare(arguments: argparse.Namespace, size: str, links: Links, report: Report) -> None:
    every = contenders(arguments, size, links)
    rows = [row for row in every if not arguments.rows or row.name.split(",")[0] in arguments.rows]
    with started(rows) as jobs:
        for mbits in arguments.mbits:
            key = f"{size}_{mbits:g}"
            new = measure(rows, jobs, links, mbits, arguments.rounds)
            for found in new.values():
                found["call"] = f"{report.data['date']}, {report.data['commit']}"
            data = {**measured_before(arguments, key), **new}
            report.table(
                f"{size} GPT, {arguments.precision}, {HOSTS} hosts x {arguments.ranks} ranks, {mbits:g} Mbit/s, "
                f"{arguments.context} tokens of each, {arguments.rounds} rounds",
                [
                    "",
                    "ms/step",
                    "CPU ms",
                    "codecs",
                    "bytes/parameter",
                    "on the link",
                    "time to plain, median [min .. max]",
                    "plain",
                    "loss",
                ],
                [cells(row, data, mbits) for row in every if row.name in data],
            )
            report.data[key] = data


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("slow_links", arguments)
    report.line(
        "bytes/parameter: what a host sends per step, headers included; on the link: ms that this takes at the rate; "
        "CPU ms: of a rank; codecs: share of the step in which a rank encodes or decodes; loss: after the warm-up"
    )
    for size in arguments.sizes:
        with links_or_exit(HOSTS) as links:
            compare(arguments, size, links, report)
    report.save()


if __name__ == "__main__":
    main()
