"""The printed profile of a BERT, line by line against the peer's, and what profiling a step costs.

Lines are compared by what they say about the model: parameters, MACs, flops and the shares of them. Times differ from
run to run and are left out. `--peer` needs an environment with the peer and Transformers of the same release.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from jobs import OURS, Job, Spread, ratios
from report import Report, common_arguments

GOAL = 1.3
LATENCY = re.compile(r"[\d.]+ (?:s|ms|us)\b(?:, [\d.]+% latency, [\d.]+ [TGMk]?FLOPS)?")


def compared_lines(text: str) -> list[str]:
    """The lines of the summary and of the modules that have numbers which do not depend on time."""
    found = []
    for line in text.splitlines():
        line = " ".join(line.split())
        if "latency" in line and ":" in line and "Params" not in line:
            continue  # a time, or a rate
        if re.search(r"params|MACs|flops per GPU:|flops of model|Params", line) and re.search(r"\d", line):
            found.append(LATENCY.sub("<time>", line))
    return found


def shared(ours: Sequence[str], peers: Sequence[str]) -> tuple[int, list[tuple[str, str]]]:
    """How many lines are equal, and those of the peer that differ beside ours."""
    equal, different = 0, []
    for kind, a, b, c, d in SequenceMatcher(None, ours, peers, autojunk=False).get_opcodes():
        if kind == "equal":
            equal += b - a
        else:
            mine, theirs = list(ours[a:b]), list(peers[c:d])
            mine += ["-"] * (len(theirs) - len(mine))
            theirs += ["-"] * (len(mine) - len(theirs))
            different += zip(mine, theirs, strict=True)
    return equal, different


def main(argv: Sequence[str] | None = None) -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--size", choices=("tiny", "large"), default="large")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.rounds = "tiny", 2
    report = Report("flops_profile", arguments)
    options = {"size": arguments.size, "batch": arguments.batch, "sequence": arguments.sequence}
    pythons = {"ours": OURS} | ({"peer": arguments.peer} if arguments.peer else {})
    texts, times = {}, {}
    for name, python in pythons.items():  # one at a time: a BERT-large takes gigabytes
        with Job(
            name, "profiled_bert:Bert", options, python=python, ranks=1, threads=arguments.threads
        ) as job:
            texts[name] = job.call("printed")[0]
            samples: dict[str, list[float]] = {"plain": [], "profiled": []}
            for each in samples:
                job.call(each)
            for _ in range(arguments.rounds):
                for each, seconds in samples.items():
                    seconds.append(job.call(each)[0])
            times[name] = samples
    rows = [
        [
            name,
            f"{Spread.of(found['plain']).median * 1e3:.1f}",
            f"{Spread.of(found['profiled']).median * 1e3:.1f}",
            ratios(found["profiled"], found["plain"]).show(),
            f"<= {GOAL}",
        ]
        for name, found in times.items()
    ]
    title = (
        f"BERT {arguments.size}, {arguments.batch} x {arguments.sequence} tokens, {arguments.threads} threads"
    )
    head = ["forward + backward", "plain ms", "profiled ms", "profiled / plain, median [min .. max]", "goal"]
    report.table(title, head, rows)
    report.data |= {"seconds": times, "profiles": texts}
    if "peer" in texts:
        ours, peers = compared_lines(texts["ours"]), compared_lines(texts["peer"])
        equal, different = shared(ours, peers)
        report.line()
        report.line(
            f"lines of the printed profile about the model: {len(peers)} of the peer, {equal} of them the same"
        )
        for mine, theirs in different[:40]:
            report.line(f"  ours: {mine}")
            report.line(f"  peer: {theirs}")
        if len(different) > 40:
            report.line(f"  and {len(different) - 40} more")
    report.save()


if __name__ == "__main__":
    main()
