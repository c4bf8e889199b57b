"""`ds trace`: waiting times in a timeline, and a merged file of all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

from deepspeed.base.tables import padded
from deepspeed.base.tool_arguments import ArgumentParser, add_options, exit_quietly, positive, takes
from deepspeed.observe.timeline.analysis import late_ranks, longest_waits, steps_of
from deepspeed.observe.timeline.files import RankTrace, join, read_traces

Rows = list[tuple[str, ...]]


@exit_quietly("ds trace", OSError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="ds trace",
        description="Summarize a timeline recorded with the config key `trace`: time per step in forward, backward, "
        "update, exposed communication and data, the longest waits by bucket or module, and who waited for whom.",
    )
    options = {
        "path": takes("the run's trace.path folder, or one of its files", type=Path),
        "-o --output FILE": takes("also write a single file with all ranks, for chrome://tracing", type=Path),
        "--show N": takes("rows per table (default: 10)", 10, type=positive),
    }
    args = add_options(parser, options).parse_args(argv)
    traces = read_traces(args.path)
    if args.output is not None:
        args.output.write_text(json.dumps(join(traces)), encoding="utf-8")
    print("\n".join(summary(traces, args.show)))
    if args.output is not None:
        print(f"\nall ranks: {args.output}; open it with chrome://tracing or ui.perfetto.dev")
    return 0


def summary(traces: Sequence[RankTrace], most: int) -> Iterator[str]:
    """Yield plain-text tables. All times are in milliseconds."""
    steps = [step for trace in traces for step in steps_of(trace)]
    rows: Rows = []
    for rank, step, *times in map(astuple, sorted(steps, key=lambda each: (each.step, each.rank))):
        rows.append((str(step), str(rank), *(f"{value:.2f}" for value in times)))
    yield "steps, in ms"
    columns = ("total", "forward", "backward", "update", "exposed communication", "copies", "data")
    yield from table(("step", "rank", *columns), rows)
    waits = longest_waits(traces)
    yield "\nlongest waits, in ms over these steps"
    yield from table(
        ("rank", "for", "of", "ms", "times"),
        [(str(w.rank), w.operation, w.subject, f"{w.milliseconds:.2f}", str(w.times)) for w in waits[:most]],
    )
    late = late_ranks(traces)
    if len(traces) > 1:
        yield "\nwho waited for whom, in ms over these steps"
        yield from table(
            ("rank", "waited for rank", "in", "ms", "times"),
            [
                (str(e.waiting), str(e.late), e.subject, f"{e.milliseconds:.2f}", str(e.times))
                for e in late[:most]
            ],
        )
    yield ""
    yield from _sentences(traces)


def _sentences(traces: Sequence[RankTrace]) -> Iterator[str]:
    """Yield one sentence per rank: its shares of exposed communication and of waiting for data."""
    for trace in traces:
        steps = steps_of(trace)
        total = sum(step.total for step in steps) or 1.0
        exposed, data = sum(step.exposed for step in steps), sum(step.data for step in steps)
        yield (
            f"rank {trace.rank}: {100 * exposed / total:.0f} % of the time is exposed communication, "
            f"{100 * data / total:.0f} % waiting for data and script"
        )


def table(head: tuple[str, ...], rows: Rows) -> Iterator[str]:
    if not rows:
        yield "  none"
        return
    yield from ("  ".join(["", *cells]).rstrip() for cells in padded([head, *rows]))


if __name__ == "__main__":
    raise SystemExit(main())
