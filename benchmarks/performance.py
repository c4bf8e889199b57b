"""Fills in the numbers of the README and of `docs/performance.md` from the benchmarks' saved results.

    python benchmarks/performance.py            writes them between the two NUMBERS markers of each page
    python benchmarks/performance.py --check    says whether they are up to date, with its exit code

Nothing is measured or typed here: every number is copied from a report in `results`. In the page, a benchmark
without a result gets no row.
"""

from __future__ import annotations

import re
from pathlib import Path

from saved import FOLDER, Cell, Found, Ratio, Source, parser_of, reports_of, tables, write_or_check

README = FOLDER.parent / "README.md"
PAGE = FOLDER.parent / "docs" / "performance.md"
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

STEP = "50M GPT, bf16, 2 ranks"
SLOW = "50M GPT, bf16, 2 hosts x 2 ranks"
DECODE = "decoding 48 tokens after 32, 88M Llama, int8"


def step(who: str) -> Cell:
    return Cell("train_step_cpu2", STEP, who, RATIO)


# What it is, the number, what it is compared with; both are formatted with the texts of the sources.
FIRST_ROWS: list[tuple[str, str, str, tuple[Source, ...]]] = [
    (
        "time of a step, 50M GPT in bf16 on two ranks, ZeRO stage 2",
        "**{0}** of DDP's",
        "DeepSpeed 0.19.8: {1}",
        (step("ours, stage 2"), step("peer, stage 2")),
    ),
    (
        "the same at stage 3",
        "**{0}** of DDP's",
        "FSDP2: {1}; DeepSpeed: {2}",
        (step("ours, stage 3"), step("FSDP2"), step("peer, stage 3")),
    ),
    (
        "`initialize`, 10M GPT, stage 2",
        "**{0} s**",
        "DeepSpeed: {1} s",
        tuple(
            Cell("start_cpu2", "start of a 10M", f"{who}, stage 2", "initialize") for who in ("ours", "peer")
        ),
    ),
    (
        "memory in which a model of 3 billion parameters trains, states on disk",
        "**{0} GiB**, at {2} and {3} s a step",
        "its states: {1} GiB",
        (
            Cell("offload_budget_3B_cpu2", "3001M", "peak of private memory, GiB", ""),
            Cell("offload_budget_3B_cpu2", "3001M", "model states (2 + 2 + 12 bytes), GiB", ""),
            Found("offload_budget_3B_cpu2", r"step, s +(\S+)"),
            Found("offload_budget_3B_cpu2", r"step, s +\S+ (\S+)"),
        ),
    ),
    (
        "longest sequence trained in a fixed memory, narrow model with a large vocabulary",
        "**{0} tokens**, at {2}",
        "plain training: {1}",
        (
            *(Cell("long_sequence_cpu2", "hidden 128", row, "longest") for row in ("and tiles", "plain")),
            Found("long_sequence_cpu2", r"tokens +loss .*; (\d+ s a step)"),
        ),
    ),
    (
        "1-bit Adam between two hosts over 100 Mbit/s, after its warm-up",
        "**{0} x** as fast as Adam",
        "{1} x fewer bytes",
        tuple(
            Ratio(
                Cell("slow_links_50M_100mbit", SLOW, "Adam", column),
                Cell("slow_links_50M_100mbit", SLOW, "1-bit Adam", column),
            )
            for column in ("ms/step", "bytes")
        ),
    ),
    (
        "decoding an 88M Llama in int8, one sequence",
        "**{0} tokens/s**",
        "llama.cpp: {1}; Transformers, in bf16: {2}",
        tuple(
            Cell("inference_decode", DECODE, who, "tokens")
            for who in ("kernels, int8", "llama.cpp, int8", "transformers, bf16")
        ),
    ),
    (
        "training again after `kill -9` of one of four ranks, 2.1M GPT at stage 3",
        "**{0} s**, {1} steps lost",
        "a step, with copies of the state in other ranks' memory: {2} ms; without: {3}",
        tuple(
            Cell("going_on_4_ranks", "4 ranks", "3", column)
            for column in ("seconds still", "steps lost", "with replicate_state", "ms/step")
        ),
    ),
]


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


def first_numbers() -> str:
    """Return the few rows of the README, each with the report that has its numbers."""
    lines = [BEGIN, "", "| what | number | compared with | printed in |", "|---|---|---|---|"]
    for what, number, other, sources in FIRST_ROWS:
        texts = [source.text().split(" [")[0] for source in sources]
        reports = dict.fromkeys(report for source in sources for report in reports_of(source))
        files = ", ".join(f"[{name}](benchmarks/results/{name}.txt), {date_of(name)}" for name in reports)
        lines.append(f"| {what} | {number.format(*texts)} | {other.format(*texts)} | {files} |")
    return "\n".join([*lines, "", END])


def date_of(report: str) -> str:
    """Return the day on which a report was printed, from its first line."""
    return Found(report, r"commit \S+, (\d{4}-\d{2}-\d{2})").text()


def between_the_markers(text: str, numbers: str) -> str:
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    return text[:begin] + numbers + text[end:]


if __name__ == "__main__":
    arguments = parser_of(__doc__).parse_args()
    for page, numbers in ((README, first_numbers()), (PAGE, numbers_of(FOLDER / "results"))):
        write_or_check(
            page, lambda text, numbers=numbers: between_the_markers(text, numbers), check=arguments.check
        )
