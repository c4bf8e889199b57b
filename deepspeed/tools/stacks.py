"""`ds stacks`: print the Python stacks and last collectives of every rank of a running job, by asking the ranks.

Each rank of a multi-rank job listens on an abstract Unix socket named by its user and process id
(`deepspeed/comm/hangs/watch.py`), so that the kernel's list of sockets is the list of ranks. A rank that does not
answer is stopped, or in native code that holds the GIL; for such a rank, only the kernel's process state is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.base.constants import RANK_SOCKET
from deepspeed.base.tool_arguments import add_options, exit_quietly, takes

ANSWER_S = 5.0
CALLS = 5
STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "blocked in the kernel", "Z": "ended"}


@exit_quietly("ds stacks")
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ds stacks",
        description="Print the Python stacks and the last collectives of every rank of a running job on this host. "
        "Shows only your own ranks. Jobs with one rank, or with comm.hang_report_seconds 0, cannot be inspected.",
    )
    options = {
        "pid": takes(
            "a rank, or the command or launcher that started it (default: all of your ranks)",
            type=int,
            nargs="?",
        ),
        "--all": "also print the stacks of threads without code of the script",
        "--json": "print one JSON object per rank",
    }
    args = add_options(parser, options).parse_args(argv)
    processes = ranks_of_user()
    if args.pid is not None:
        processes = sorted(set(processes) & {args.pid, *descendants(args.pid)})
    if not processes:
        where = f"process {args.pid} has no" if args.pid is not None else "there are no"
        print(
            f"ds stacks: {where} ranks of a running job of user {os.getuid()} on this host", file=sys.stderr
        )
        return 1
    answers = [(process, ask(process)) for process in processes]
    answers.sort(key=lambda pair: (pair[1] or {}).get("rank", sys.maxsize))
    for process, answer in answers:
        if args.json:
            print(json.dumps(answer or {"pid": process, "state": state_of(process)}))
        else:
            print("\n".join(rank_lines(process, answer, every=args.all)))
    return 0


def ranks_of_user() -> list[int]:
    """Return the process ids of this user's ranks, from the kernel's list of Unix sockets."""
    prefix = "@" + RANK_SOCKET.format(user=os.getuid(), process="")
    try:
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    names = {line.split()[-1] for line in lines if prefix in line}
    ends = (name[len(prefix) :] for name in names if name.startswith(prefix))
    return sorted(int(end) for end in ends if end.isdecimal())


def descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def ask(process: int) -> dict[str, Any] | None:
    """Return the rank's answer; None if it does not answer within ``ANSWER_S``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect("\0" + RANK_SOCKET.format(user=os.getuid(), process=process))
            parts = list(iter(lambda: connection.recv(1 << 16), b""))
            return json.loads(b"".join(parts))
        except (OSError, ValueError):
            return None


def state_of(process: int) -> str:
    """Return the state of the process as the kernel reports it."""
    try:
        letter = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    return STATES.get(letter, "running native code that holds the GIL")


def rank_lines(process: int, answer: dict[str, Any] | None, *, every: bool = False) -> list[str]:
    """Return the lines about one rank. ``every``: also print the stacks of threads without code of the script."""
    if answer is None:
        return [f"== process {process} does not answer: {state_of(process)}", ""]
    facts = [answer["position"], f"in {answer['call']}" if answer["call"] else answer["doing"]]
    lines = [
        f"== rank {answer['rank']} ({answer['host']}, process {process}): {'; '.join(filter(None, facts))}"
    ]
    for group in answer["groups"]:
        calls = group["calls"][-CALLS:]
        first = group["count"] - len(calls) + 1
        ranks = ", ".join(map(str, group["ranks"]))
        lines.append(f"last collectives of ranks {ranks} ({group['count']} in all):")
        lines += [f"  #{number} {_call(call)}" for number, call in enumerate(calls, first)]
    shown = [thread for thread in answer["threads"] if every or thread["of_user"]]
    for thread in shown:
        lines += [f"thread {thread['name']}, innermost last:", *(f"  {line}" for line in thread["stack"])]
    others = [thread["name"] for thread in answer["threads"] if thread not in shown]
    if others:
        lines.append(f"threads without code of the script (--all prints them): {', '.join(others)}")
    return [*lines, ""]


def _call(call: Sequence[Any]) -> str:
    operation, numel, dtype, root, phase = call
    size = f" of {numel} {dtype}" if numel > 0 else f" of {dtype}" if dtype else ""
    return (
        operation
        + size
        + (f" with root {root}" if root is not None else "")
        + (f", {phase}" if phase else "")
    )


if __name__ == "__main__":
    raise SystemExit(main())
