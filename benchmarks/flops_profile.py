"""Printed profiles of a BERT and of AlexNet, line by line beside the peer's, and what profiling a step costs.

Lines are compared by what they say about the model (`profile_lines.py`). `--peer` needs an environment with the peer
and Transformers of the same release.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs import OURS, Job, Spread, ratios
from profile_lines import compare
from report import Report, common_arguments

GOAL = 1.3
REASONS = {
    "params of model = params per gpu * mp_size": "the peer's is 0 without an engine",
    "fwd flops per gpu": "ours has the GELU, which the peer counts only where it is called as F.gelu",
    "fwd flops of model = fwd flops per gpu * mp_size": "the same",
}
TEXTS = {
    "get_model_profile of the BERT": "printed",
    "get_model_profile of AlexNet": "printed_alexnet",
    "section flops_profiler, training the BERT": "printed_by_the_engine",
}
MAX_SHOWN = 40


def lines_of(report: Report, what: str, ours: str, theirs: str) -> None:
    """Says how many lines are equal, and shows the others side by side."""
    found = compare(ours, theirs)
    report.line()
    report.line(f"{what}: {found.lines} shared lines, {found.equal} of them with the same numbers")
    for line, (mine, peers) in list(found.different.items())[:MAX_SHOWN]:
        reason = f"  ({REASONS[line]})" if line in REASONS else ""
        report.line(f"  {line}: ours {', '.join(mine)}, peer {', '.join(peers)}{reason}")
    for title, lines in (("only ours", found.only_ours), ("only the peer's", found.only_theirs)):
        if lines:
            report.line(f"  {title}: {'; '.join(lines[:MAX_SHOWN])}")
    report.data |= {what: {"shared": found.lines, "different": found.different}}


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
            texts[name] = {what: job.call(method)[0] for what, method in TEXTS.items()}
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
    report.data |= {"seconds": times}
    if "peer" in texts:
        for what in TEXTS:
            lines_of(report, what, texts["ours"][what], texts["peer"][what])
    report.save()


if __name__ == "__main__":
    main()
