"""Time to the first token of short prompts while long ones arrive: the table of inference.py.

Requests come in an open loop, one in eight with a long prompt. The same requests are served on an idle machine (each
alone), and under load in three ways: with prompts split over forwards of a constant size (SplitFuse), where short ones
overtake long ones; split, but strictly in the order of arrival; and with prompts in one piece: the same engine with a
budget that holds the longest, where short ones overtake too, but not what has begun.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from jobs import Job
from report import Report

SHORT, LONG, EVERY = 32, 1024, 8
NEW = 16  # tokens of an answer
WHOLE = LONG + 64


def workload(count: int, vocabulary: int, number: int) -> list[list[int]]:
    """Prompts of the round ``number``."""
    draw = random.Random(3 + 2 * number)
    sizes = [LONG if i % EVERY == EVERY // 2 else SHORT for i in range(count)]
    return [[draw.randrange(vocabulary) for _ in range(size)] for size in sizes]


def percentile(values: list[float], part: float) -> float:
    """The smallest that so large a part of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def measure(job: Job, arguments: argparse.Namespace, vocabulary: int, number: int) -> dict[str, Any]:
    """Of the round ``number``: seconds by the name of the row, and the lengths of the prompts."""
    prompts = workload(arguments.arrivals, vocabulary, number)
    draw = random.Random(4 + 2 * number)
    gaps = [draw.expovariate(arguments.rate) for _ in prompts]

    def serve(budget: int, which: list[list[int]], gaps: list[float], **more: float) -> list[float]:
        return job.call("first_tokens", budget=budget, arrivals=which, gaps=gaps, tokens=NEW, **more)[0]

    kinds = [next(p for p in prompts if len(p) == size) for size in (SHORT, LONG)]
    idle = {
        len(prompt): statistics.median(serve(arguments.budget, [prompt], [0.0])[0] for _ in range(times))
        for prompt, times in zip(kinds, (15, 3), strict=True)
    }
    return {
        "lengths": [len(prompt) for prompt in prompts],
        "idle": [idle[len(prompt)] for prompt in prompts],
        "split": serve(arguments.budget, prompts, gaps),
        "in order": serve(arguments.budget, prompts, gaps, share=0.0),
        "whole": serve(WHOLE, prompts, gaps),
    }


def table(report: Report, arguments: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    """Percentiles over all requests of all rounds."""
    titles = {
        "idle": "idle machine",
        "split": f"under load, {arguments.budget} tokens per forward",
        "in order": "the same, in the order of arrival",
        "whole": "under load, prompts in one piece",
    }

    def of(name: str, size: int | None) -> list[float]:
        return [
            t for one in rounds for t, n in zip(one[name], one["lengths"], strict=True) if size in (None, n)
        ]

    cells = []
    for name, title in titles.items():
        row = [title]
        for size in (None, SHORT, LONG):
            late, alone = percentile(of(name, size), 0.95), percentile(of("idle", size), 0.95)
            row += [f"{late * 1e3:.0f}", f"{late / alone:.2f}"]
        row.append(f"{statistics.median(of(name, SHORT)) * 1e3:.0f}")
        cells.append(row)
    report.table(
        f"time to the first token, 95th percentile, ms: {arguments.arrivals} requests, {arguments.rate:g} per second, "
        f"one in {EVERY} of {LONG} tokens, others of {SHORT}, answers of {NEW}, fp32, {len(rounds)} rounds; goal: all "
        "requests, split, <= 2.00 of idle",
        [
            "",
            "all",
            "of idle",
            f"{SHORT} tokens",
            "of idle",
            f"{LONG} tokens",
            "of idle",
            f"median of {SHORT}",
        ],
        cells,
    )
