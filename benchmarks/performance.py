"""Fills in the numbers of the README from the benchmarks' saved results.

    python benchmarks/readme.py            writes them between the two NUMBERS markers of README.md
    python benchmarks/readme.py --check    says whether they are up to date, with its exit code

Nothing is measured or typed here: every cell is copied from a table in `results/*_cpu2.txt`, and a benchmark without a
result gets no row.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parent / "README.md"
BEGIN, END = "<!-- NUMBERS -->", "<!-- /NUMBERS -->"
SETTINGS = ("10M GPT, fp32", "10M GPT, bf16", "50M GPT, fp32", "50M GPT, bf16")
RATIO = "ratio to DDP, median [min .. max]"
STEP_ROWS = ("0", "1", "2", "3", "2+cpu", "3+cpu", "3+nvme")
CHECKPOINT = {"save, s": "s to save", "load, s": "s to load", "MB on disk": "MB"}
# What it is, script, beginning of the table's title, our row, columns with units.
OTHER_ROWS: list[tuple[str, str, str, str, dict[str, str]]] = [
    *(
        (f"engine overhead per step of a small MLP, over plain torch with clipping, stage {s}", "engine_cost", "MLP",
         f"ours, stage {s}", {"over": "us"})
        for s in range(4)
    ),
    ("`import deepspeed`, on top of `import torch`", "start", "import", "ours", {"median": "s"}),
    ("`initialize`, 10M GPT, stage 2", "start", "start of a 10M", "ours, stage 2", {"initialize": "s"}),
    ("checkpoint of a 50M GPT, stage 2", "checkpoint", "50M", "ours, stage 2", CHECKPOINT),
    *(
        (f"AdamW on 100M parameters, one thread, {what}", "adam", f"100M parameters, 1 thread, {what}",
         "ours", {"ms": "ms"})
        for what in ("fp32 only", "with bf16 copy-out")
    ),
    *(
        (f"step of Transformers' Trainer, tiny Llama, fp32, stage {s}", "trainer_step", "tiny Llama (1.9M), fp32",
         f"ours, stage {s}", {"ms/step": "ms"})
        for s in (2, 3)
    ),
    *(
        (f"step of a 15M Llama, {what} split over 2 ranks, fp32, stage 1", "tensor_parallel",
         "small Llama, fp32, stage 1", f"ours, {kind} 2", {"ms/step": "ms"})
        for kind, what in (("DP", "data"), ("TP", "layers"), ("SP", "sequences"))
    ),
]  # fmt: skip


def tables(text: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of each table in a saved report: the line of dashes under the header tells the columns."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if number < 2 or not re.fullmatch(r"-+(  -+)+", line):
            continue
        spans = [match.span() for match in re.finditer(r"-+", line)]
        rows = []
        for row in lines[number + 1 :]:
            if not row:
                break
            rows.append([row[begin:end].strip() for begin, end in spans])
        yield lines[number - 2], [lines[number - 1][begin:end].strip() for begin, end in spans], rows


class Results:
    """All reports of one machine, and which of them were used."""

    def __init__(self, folder: Path, what: str = "cpu2") -> None:
        paths = sorted(folder.glob(f"*_{what}.txt"))
        self.texts = {path.stem.removesuffix(f"_{what}"): path.read_text() for path in paths}
        self.used: list[str] = []

    def find(self, name: str, title: str, row: str, column: str) -> str | None:
        """The median in a cell, looked for in every report whose name begins with ``name``; None if there is none."""
        for report, text in self.texts.items():
            if report != name and not report.startswith(f"{name}_"):
                continue
            for found, header, rows in tables(text):
                cells = {cells[0]: cells for cells in rows}.get(row)
                if not found.startswith(title) or cells is None:
                    continue
                cell = next(
                    (cell for name, cell in zip(header, cells, strict=True) if name.startswith(column)), ""
                )
                if cell:
                    self.used += [report] if report not in self.used else []
                    return cell.split(" [")[0]
        return None

    def sources(self) -> str:
        """At which commit each used report was taken, and on which machine."""
        by_commit: dict[str, list[str]] = {}
        for report in self.used:
            match = re.search(r"commit (\S+), (\S+)", self.texts[report])
            by_commit.setdefault(
                f"commit {match.group(1)}, {match.group(2)}" if match else "unknown", []
            ).append(report)
        machines = sorted({self.texts[report].splitlines()[1] for report in self.used})
        said = "; ".join(f"{commit}: {', '.join(reports)}" for commit, reports in by_commit.items())
        return f"Machine: {' / '.join(machines)}. Results: {said}."


def step_times(results: Results) -> list[str]:
    """Ours and the peer's step time over DDP's, a row per stage, a column per model and precision."""
    lines = []
    for kind in STEP_ROWS:
        cells = []
        for setting in SETTINGS:
            pair = [
                results.find("train_step", setting, f"{who}, stage {kind}", RATIO) for who in ("ours", "peer")
            ]
            cells.append(f"**{pair[0]}** ({pair[1]})" if pair[0] else "")
        if any(cells):
            what = kind.replace("+cpu", ", offload to host memory").replace("+nvme", ", offload to NVMe")
            lines.append(f"| stage {what} | {' | '.join(cells)} |")
    for name, what in (("FSDP2", "FSDP2 (torch)"), ("compute alone", "no communication at all")):
        cells = [results.find("train_step", setting, name, RATIO) or "" for setting in SETTINGS]
        if any(cells):
            lines.append(f"| {what} | {' | '.join(cells)} |")
    if not lines:
        return []
    columns = " | ".join(SETTINGS)
    return [f"| step time / DDP, ours (peer) | {columns} |", "|---|---|---|---|---|", *lines, ""]


def other_numbers(results: Results) -> list[str]:
    """A line each: what, ours, the peer's, the script."""

    def numbers(name: str, title: str, row: str, columns: dict[str, str]) -> str:
        found = [(results.find(name, title, row, column), unit) for column, unit in columns.items()]
        return ", ".join(f"{value} {unit}" for value, unit in found if value)

    lines = []
    for what, name, title, row, columns in OTHER_ROWS:
        if ours := numbers(name, title, row, columns):
            peer = numbers(name, title, row.replace("ours", "peer"), columns)
            lines.append(f"| {what} | {ours} | {peer} | `benchmarks/{name}.py` |")
    shared, peer, gloo = (
        results.find("comm_shared_memory", "all_reduce, 2 ranks", "32,768 KiB", f"{who} us")
        for who in ("shared memory", "peer", "gloo")
    )
    if shared:
        what = f"all-reduce of 32 MiB, 2 ranks on one host (gloo: {gloo} us)"
        lines.append(f"| {what} | {shared} us | {peer} us | `benchmarks/comm_shared_memory.py` |")
    return ["| what | ours | peer | script |", "|---|---|---|---|", *lines, ""] if lines else []


def numbers_of(folder: Path) -> str:
    """Everything between the markers."""
    results = Results(folder)
    body = [*step_times(results), *other_numbers(results)]
    return "\n".join([BEGIN, "", *body, f"{results.sources()}", "", END])


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script that writes a page from saved results, described by the script's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if it is not up to date"
    )
    return parser


def write_or_check(page: Path, make: Callable[[str], str], *, check: bool) -> None:
    """Write what ``make`` makes of the page's text, "" if there is none; with ``check`` leave with an error instead, if
    that is another text."""
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    after = make(before)
    if not check:
        page.write_text(after, encoding="utf-8")
    elif after != before:
        sys.exit(f"{page.name}: not the numbers of benchmarks/results; run this script")


def with_numbers(text: str) -> str:
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    return text[:begin] + numbers_of(FOLDER / "results") + text[end:]


if __name__ == "__main__":
    arguments = parser_of(__doc__).parse_args()
    write_or_check(README, with_numbers, check=arguments.check)
