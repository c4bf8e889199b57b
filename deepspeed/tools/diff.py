"""`ds diff`: find the first difference between two recorded runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from deepspeed.base.tables import padded
from deepspeed.base.tool_arguments import ArgumentParser, add_options, exit_quietly, positive, takes
from deepspeed.observe.audit.compare import Comparison, Difference, compare, step_name
from deepspeed.observe.audit.records import Run, read_run

SAME, DIFFERENT = 0, 1
COLUMNS = ("step", "phase", "tensor", "module", "by how much")


@exit_quietly("ds diff", ValueError, OSError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="ds diff",
        description="Compare two runs recorded with the config key `audit`, and find the first tensor, module, step "
        "and phase that differ, and by how much. The exit code is 0 if the runs are the same, 1 if they differ, 2 if "
        "they cannot be compared.",
    )
    options = {
        "run_a": takes("audit.record folder of one run", type=Path),
        "run_b": takes("audit.record folder of the other run", type=Path),
        "--tolerance X": takes(
            "largest relative difference to ignore; 0 compares every bit (default: 0 if both runs do the same "
            "arithmetic, otherwise depending on their precision)",
            type=_tolerance,
        ),
        "--show N": takes("number of differences to list (default: 10)", 10, type=positive),
        "--json": "print the result as JSON",
    }
    args = add_options(parser, options).parse_args(argv)
    a, b = read_run(args.run_a), read_run(args.run_b)
    found = compare(a, b, args.tolerance)
    if args.json:
        print(json.dumps(asdict(found)))
    else:
        print("\n".join(text_of(found, a, b)))
        if found.differences:
            show_table(found.differences, args.show)
    return DIFFERENT if found.differences else SAME


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def text_of(found: Comparison, a: Run, b: Run) -> Iterator[str]:
    """Yield the result in a few lines."""
    for name, run in (("A", a), ("B", b)):
        facts, precision = run.metadata, run.metadata["numerics"]["precision"]
        yield f"{name}: {run.folder}: {facts['ranks']} ranks, ZeRO stage {facts['stage']}, {precision}"
    steps = [step for step in found.steps if step]
    what = f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
    if found.tolerance:
        yield f"compared: {what}, within {found.tolerance:g}"
    else:
        yield f"compared: {what}, every bit"
    if found.reasons:
        yield f"different arithmetic: {'; '.join(found.reasons)}"
    first, tensor = found.first, found.first_tensor
    if first is None:
        yield "the same"
    else:
        yield f"first difference: {first}"
        if tensor is not None and tensor is not first:
            yield f"first tensor:     {tensor}"
    yield from (f"also different: {text}" for text in found.causes)
    yield from (f"recorded: {text}" for text in found.remarks)


def show_table(differences: Sequence[Difference], rows: int) -> None:
    """Print the first differences as a table, with `rich` if it is installed."""
    shown = [
        (step_name(each.step).removeprefix("step "), each.phase, each.tensor, each.module, each.text)
        for each in differences[:rows]
    ]
    rest = len(differences) - len(shown)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join("  ".join(cells).rstrip() for cells in padded([COLUMNS, *shown])))
    else:
        table = Table()
        for column in COLUMNS:
            table.add_column(column, overflow="fold")  # long names wrap instead of being cut
        for row in shown:
            table.add_row(*row)
        Console().print(table)
    if rest:
        print(f"and {rest} more")


if __name__ == "__main__":
    raise SystemExit(main())
