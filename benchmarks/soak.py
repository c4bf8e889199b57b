"""Ask `ds serve` for minutes as many clients do, well and badly, and check at the end that it has lost nothing.

Clients read whole answers and streams, leave in the middle, read slowly, want structured answers, name adapters, and
send what is not a request; another one polls /health and /metrics. After a warm-up and again at the end, when all
requests have ended, the server is at rest: its free blocks, own memory, threads and open files are compared. Greedy
answers must be those of an idle server: prompts where the two likeliest tokens are nearly equal are left out first, as
there the order of a sum decides.

The exit status is 1 if anything is wrong. `--quick` takes seconds; the default is half an hour.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import progress
from report import Report, common_arguments
from rivals import System, started
from soak_clients import KINDS, MODELS, Case, Clients, Connection, choose_cases, save_models

REST_S = 60
"""Within this time the last requests end, and idle threads and connections with them."""
SHARE = 0.15  # of the time, before what is there counts


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=30, help="of clients, with the warm-up")
    parser.add_argument("--concurrent", type=int, default=12, help="clients")
    parser.add_argument("--cases", type=int, default=24, help="requests of each model with known answers")
    parser.add_argument("--growth-mb", type=float, default=32, help="limit: own memory after the warm-up")
    parser.add_argument("--growth-threads", type=int, default=0, help="limit, likewise")
    parser.add_argument("--growth-files", type=int, default=0, help="limit, likewise: open files")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.minutes, arguments.cases = 0.15, 6
    return arguments


@dataclass(frozen=True)
class Held:
    """What a server holds when no request is running. ``memory``: its own, in MB; ``requests``: by how they ended."""

    blocks: int
    free_blocks: int
    running: int
    memory: float
    threads: int
    files: int
    requests: int


def held(process: int, connection: Connection) -> Held:
    """Read the server's metrics, and what the kernel says of its process."""
    numbers = connection.metrics()
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line
    )
    return Held(
        blocks=int(numbers["deepspeed_blocks"]),
        free_blocks=int(numbers["deepspeed_free_blocks"]),
        running=int(numbers["deepspeed_requests"]),
        memory=int(status["RssAnon"].split()[0]) / 1024,
        threads=int(status["Threads"]),
        files=len(list(Path(f"/proc/{process}/fd").iterdir())),
        requests=int(sum(value for name, value in numbers.items() if "deepspeed_requests_total" in name)),
    )


def at_rest(process: int, connection: Connection, before: Held | None, arguments: argparse.Namespace) -> Held:
    """Wait until no request runs, and what the server holds is within the limits or the time is up."""
    until = time.monotonic() + REST_S
    while True:
        found = held(process, connection)
        quiet = not found.running and found.free_blocks == found.blocks
        if quiet and (before is None or not problems(before, found, arguments)):
            return found
        if time.monotonic() > until:
            return found
        time.sleep(0.5)


def problems(before: Held, after: Held, arguments: argparse.Namespace) -> list[str]:
    """Return what has leaked between two times of rest."""
    found = []
    if after.running:
        found.append(f"{after.running} requests never end")
    if after.free_blocks != after.blocks:
        found.append(f"{after.blocks - after.free_blocks} of {after.blocks} blocks are not free")
    for name, limit, unit in (
        ("memory", arguments.growth_mb, " MB"),
        ("threads", arguments.growth_threads, ""),
        ("files", arguments.growth_files, ""),
    ):
        grown = getattr(after, name) - getattr(before, name)
        if grown > limit:
            found.append(
                f"{name}: {grown:.0f}{unit} more than after the warm-up, the limit is {limit:g}{unit}"
            )
    return found


def poll(port: int, process: int, stopped: threading.Event, seen: list[Held], wrong: list[str]) -> None:
    """Ask for /health and /metrics until stopped, and note what the server holds."""
    while not stopped.wait(0.5):
        try:
            connection = Connection(port)
            if (status := connection.get("/health")[0]) != 200:
                wrong.append(f"/health: {status}")
            seen.append(held(process, connection))
        except Exception as error:
            wrong.append(f"polling: {error!r}")


def soak(port: int, process: int, cases: Sequence[Case], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the clients for the warm-up and for the rest of the time; return what was found."""
    clients, connection = Clients(port, cases), Connection(port)
    seconds, stopped, seen = arguments.minutes * 60, threading.Event(), list[Held]()
    polling = threading.Thread(target=poll, args=(port, process, stopped, seen, clients.wrong))
    polling.start()
    try:
        progress("warming up")
        clients.run(seconds * SHARE, arguments.concurrent, f"{arguments.seed} warm-up")
        before = at_rest(process, connection, None, arguments)
        progress(f"{seconds * (1 - SHARE):.0f} s of clients")
        clients.run(seconds * (1 - SHARE), arguments.concurrent, str(arguments.seed))
    finally:
        stopped.set()
        polling.join()
    after = at_rest(process, connection, before, arguments)
    return {
        "kinds": dict(Counter(clients.counts)),
        "before": asdict(before),
        "after": asdict(after),
        "polled": len(seen),
        "most": {name: max((getattr(one, name) for one in seen), default=0) for name in asdict(after)},
        "problems": problems(before, after, arguments) + [f"wrong: {each}" for each in clients.wrong[:20]],
    }


def tables(report: Report, arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    rows = [[kind, str(found["kinds"].get(kind, 0))] for kind in KINDS]
    title = f"{arguments.minutes:g} minutes, {arguments.concurrent} clients, {found['polled']} polls of the metrics"
    report.table(title, ["requests", ""], rows)
    names = ("free_blocks", "memory", "threads", "files")
    cells = [
        [title, *[f"{found[when][name]:.0f}" for name in names]]
        for title, when in (("after the warm-up", "before"), ("at the end", "after"), ("most", "most"))
    ]
    report.table("at rest", ["", "free blocks", "own memory, MB", "threads", "open files"], cells)
    report.line()
    for problem in found["problems"]:
        report.line(problem)
    report.line("FAILED" if found["problems"] else "nothing leaked, and every answer was right")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    report = Report("soak", arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        command = [sys.executable, "-m", "deepspeed.tools.serve", str(folder / "model"), "--name", MODELS[0]]
        command += ["--dtype", "fp32", "--max-model-len", "256", "--max-num-seqs", "8", "--cache-gb", "0.001"]
        command += ["--lora-modules", *[f"{each}={folder / each}" for each in MODELS[1:]]]
        with started(System("ours", command, ready="/ready")) as server:
            cases = choose_cases(server.port, arguments.cases)
            found = soak(server.port, server.process, cases, arguments)
    report.data["found"] = found
    tables(report, arguments, found)
    report.save()
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
