"""`ds top`: the runs of this user on this machine, in a terminal."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from deepspeed.base.tables import padded
from deepspeed.base.tool_arguments import ArgumentParser, add_options
from deepspeed.observe.live.jobs import VARIABLE, running_jobs, runtime_folder

PAUSE_S = 2.0
SILENT_S = 15.0
COLUMNS = (
    "job", "pid", "step", "loss", "curve", "speed", "step ms", "memory/planned", "ranks", "state", "left",
    "page",
)  # fmt: skip
BARS = "▁▂▃▄▅▆▇█"
CURVE = 16
CLEAR = "\x1b[H\x1b[2J"
GIB = 2**30

Job = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="ds top",
        description="Show your runs on this machine that have the config key `monitor.live`, and what their ranks "
        "are doing. Stop with Ctrl-C.",
    )
    options = {
        "--once": "print once and exit; the default without a terminal",
        "--ranks": "also show a line for each rank",
    }
    args = add_options(parser, options).parse_args(argv)
    terminal = _is_terminal()
    try:
        if args.once or not terminal:
            _print_once(args.ranks, terminal)
        else:
            _keep_showing(args.ranks)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `| head` has closed it; nothing may be flushed into it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # closed
        return False


def _print_once(ranks: bool, terminal: bool) -> None:
    jobs = running_jobs()
    rich = _rich() if terminal else None
    if rich is not None and jobs:
        rich.print(_pretty(jobs, ranks))
    else:
        print("\n".join(plain(jobs, ranks, time.time())), flush=True)


def _keep_showing(ranks: bool) -> None:
    console = _rich()
    if console is None:
        while True:
            lines = [*plain(running_jobs(), ranks, time.time()), "", "Ctrl-C stops it"]
            print(CLEAR + "\n".join(lines), flush=True)
            time.sleep(PAUSE_S)
    from rich.live import Live

    with Live(_pretty(running_jobs(), ranks), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(PAUSE_S)
            live.update(_pretty(running_jobs(), ranks), refresh=True)


def _rich() -> Any:
    """Return a `rich` console, or None if `rich` is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()


def _pretty(jobs: list[Job], ranks: bool) -> Any:
    """Render with `rich` the page that ``plain`` renders as text."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now = time.time()
    if not jobs:
        return Text(nothing())
    table = Table(expand=True, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold", justify="left" if column in _LEFT else "right")
    for job in jobs:
        cells = row_of(job, now)
        bad = cells[9] not in ("running", "starts")
        table.add_row(
            *(Text(cell, style="bold red" if bad and i == 9 else "") for i, cell in enumerate(cells))
        )
    below = [Text(line) for line in notes(jobs, ranks, now)]
    return Group(table, *below)


_LEFT = {"job", "curve", "ranks", "state", "page"}


def plain(jobs: list[Job], ranks: bool, now: float) -> Iterator[str]:
    if not jobs:
        yield nothing()
        return
    rows = [COLUMNS, *(row_of(job, now) for job in jobs)]
    left = [column for column, name in enumerate(COLUMNS) if name in _LEFT]
    yield from ("  ".join(cells).rstrip() for cells in padded(rows, left))
    yield from notes(jobs, ranks, now)


def nothing() -> str:
    return (
        f"No run of user {os.getuid()} with `monitor.live` on this machine ({runtime_folder()}; {VARIABLE} names "
        "another folder)."
    )


def row_of(job: Job, now: float) -> tuple[str, ...]:
    run = job.get("run") or {}
    total, step, step_s = run.get("total_steps"), job.get("step"), job.get("step_s")
    left = timedelta(seconds=round(max(0, total - step) * step_s)) if total and step and step_s else None
    if job.get("tokens_s"):
        speed = f"{job['tokens_s']:.4g} tok/s"
    else:
        speed = f"{job['samples_s']:.4g} /s" if job.get("samples_s") else "-"
    if job.get("mfu"):
        speed += f" {job['mfu']:.0%}"
    planned = (job.get("plan") or {}).get("line")
    memory = f"{job['memory'] / GIB:.2f}" if job.get("memory") else "-"
    memory += f"/{planned / GIB:.2f} GiB" if planned else " GiB"
    return (
        str(run.get("name", "?")),
        str(job["pid"]),
        "-" if step is None else f"{step}/{total}" if total else str(step),
        "-" if job.get("loss") is None else f"{job['loss']:.4g}",
        sparkline(job.get("losses") or []),
        speed,
        "-" if not step_s else f"{1e3 * step_s:.4g}",
        memory,
        _ranks(job),
        _state(job, now),
        str(left) if left is not None else "-",
        str(job.get("address") or job.get("folder") or "-"),
    )


def _state(job: Job, now: float) -> str:
    if now - (job.get("now") or now) > SILENT_S:
        return "silent"
    if job.get("hang"):
        return "hangs"
    return "running" if job.get("step") and job.get("loss", 0) is not None else "starts"


def _ranks(job: Job) -> str:
    count = (job.get("run") or {}).get("ranks", "?")
    slowest = job.get("slowest")
    return str(count) + (f", slowest {slowest}" if slowest is not None else "")


def notes(jobs: list[Job], ranks: bool, now: float) -> Iterator[str]:
    """Yield the lines below the table: hangs, last checkpoints, ranks."""
    for job in jobs:
        name = f"{(job.get('run') or {}).get('name', '?')} ({job['pid']})"
        if job.get("saved"):
            yield f"{name}: last checkpoint at step {job['saved']['step']}, {job['saved']['text']}"
        if ranks:
            for each in job.get("ranks") or []:
                own = (
                    ""
                    if each.get("arrival_ms") is None
                    else f", {each['arrival_ms']:.4g} ms until its gradients"
                )
                ago = max(0.0, (job.get("now") or now) - each["seen"])
                memory = f"{(each.get('memory') or 0) / GIB:.2f} GiB"
                yield f"{name}: rank {each['rank']}: step {each['step']}{own}, {memory}, seen {ago:.0f} s ago"
        if job.get("hang"):
            yield f"{name} hangs:"
            yield from (f"  {line}" for line in job["hang"].splitlines()[:12])


def sparkline(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return ""
    if len(known) > CURVE:
        edges = [round(i * len(known) / CURVE) for i in range(CURVE + 1)]
        known = [sum(known[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(known), max(known)
    span = high - low or 1.0
    return "".join(BARS[min(7, int(8 * (value - low) / span))] for value in known)


if __name__ == "__main__":
    raise SystemExit(main())
