"""Failures of ranks: finds the root cause and formats the report. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.base.constants import RANK_ENDED
from deepspeed.tools.launcher.errors import logger
from deepspeed.tools.launcher.shim import LOCAL_RANK_OPTION, USAGE_ERROR

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MESSAGE_LENGTH = 400
# Text of exceptions raised because a peer is gone: ours, gloo's, NCCL's and the store's.
LOST_PEER_PATTERN = (
    rf"{RANK_ENDED}|gloo/transport|Connection (was )?(likely )?(closed|reset)|Broken pipe"
    r"|\bDist(Backend|Network|Store)Error"
)
_LOST_PEER = re.compile(LOST_PEER_PATTERN, re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one rank."""

    rank: int
    at: float  # seconds since the epoch
    exit_code: int  # negative: minus the number of the signal that killed it
    message: str  # the exception in one line; empty if there was none
    traceback: str
    first: bool  # it reported itself as the first rank of its machine to raise
    on_screen: bool  # the rank printed its traceback itself
    lost_peer: bool = False  # its message says that it failed because a peer was gone
    stopped: bool = False  # by the agent, because another rank had failed
    departed: bool = False  # it ended with exit code 0: a failure if others were training, see `causes_first`
    host: str = ""  # set if several machines are reported together

    @classmethod
    def by_leaving(cls, rank: int, at: float) -> Failure:
        """Build the entry of a rank that ended with exit code 0."""
        return cls(rank, at, 0, "", "", first=False, on_screen=False, departed=True)

    @classmethod
    def of(
        cls, rank: int, process: ProcessFailure, ended_at: float | None, stopped_at: float | None = None
    ) -> Failure:
        """Build the entry from the rank's error file if it raised an exception, else from its exit code."""
        report: dict[str, Any] = {}
        try:
            report = json.loads(Path(process.error_file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass
        inner: Any = report.get("message", {})
        inner = inner if isinstance(inner, dict) else {"message": str(inner)}
        # A rank that reported an exception may exit slowly and be stopped like the others before it does.
        exit_code = report.get("exit_code", 1) if report and process.exitcode < 0 else process.exitcode
        message = str(inner.get("message", ""))
        # A killed process closes its connections before its exit is seen: a peer that notices did not fail first.
        lost_peer = _LOST_PEER.search(str(report.get("origin") or message)) is not None
        raised_at = None if ended_at and lost_peer else report.get("time")
        late = stopped_at is not None and (ended_at or process.timestamp + 1.0) >= stopped_at
        return cls(
            rank=rank,
            # The agent truncates its timestamp to whole seconds: take the end of that second, to err on the late side.
            at=raised_at or ended_at or process.timestamp + 1.0,
            exit_code=exit_code,
            message=_in_one_line(message),
            traceback=inner.get("extraInfo", {}).get("py_callstack", ""),
            first=report.get("first", False),
            on_screen=report.get("on_screen", False),
            lost_peer=lost_peer,
            stopped=late and not report and -process.exitcode in (signal.SIGTERM, signal.SIGKILL),
        )

    @property
    def command_exit_code(self) -> int:
        """Return the code that a shell would report: 128 + N for signal N. Never 0."""
        if self.departed:
            return 1
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    @property
    def place(self) -> str:
        """Rank, with its host if there are several."""
        return f"{self.rank} ({self.host})" if self.host else str(self.rank)

    @property
    def how(self) -> str:
        if self.exit_code >= 0:
            code = f"exit code {self.exit_code}"
            return f"{self.message} ({code})" if self.message else code
        hint = ", perhaps out of memory" if self.exit_code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-self.exit_code).name}{hint} (exit code {self.command_exit_code})"


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """Sort failures causes first, then by time: ranks that lost a peer come later, ranks stopped by the agent last.

    Of two exceptions in the same millisecond, the one whose rank printed its traceback comes first.
    """
    failures = list(failures)
    printed = [failure.at for failure in failures if failure.first and not failure.lost_peer]

    def moment(failure: Failure) -> tuple[bool, bool, float, bool]:
        has_report = bool(failure.traceback) and bool(printed)
        at = max(failure.at, *printed) if has_report else failure.at
        return failure.stopped, failure.lost_peer, at, not failure.first

    return sorted(failures, key=moment)


def causes_first(entries: Iterable[Failure]) -> list[Failure]:
    """Sort the failures of a job `in_order`. Ranks that left are included only if every other cause is a lost peer and
    they left before those failures; only the entries of all machines together can tell."""
    entries = list(entries)
    failures = [entry for entry in entries if not entry.departed]
    causes = [failure for failure in failures if not failure.stopped]
    if not causes or not all(failure.lost_peer for failure in causes):
        return in_order(failures)
    began = min(failure.at for failure in causes)
    departed_by_rank = {entry.rank: entry for entry in entries if entry.departed and entry.at <= began}
    others = [failure for failure in failures if failure.rank not in departed_by_rank]
    return in_order([*departed_by_rank.values(), *others])


def _is_refused_option(failure: Failure) -> bool:
    """Tell whether a script may have rejected its arguments: argparse and click exit with 2, other parsers name the
    option."""
    return failure.exit_code == USAGE_ERROR or LOCAL_RANK_OPTION in failure.message


def _in_one_line(message: str) -> str:
    """Return the first line of an exception's text, with the second if the first ends with a colon."""
    first, *others = message.strip().splitlines() or [""]
    if first.endswith(":") and others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        first = f"{first} {others[0].strip()}{more}"
    return first if len(first) <= MESSAGE_LENGTH else f"{first[:MESSAGE_LENGTH].rsplit(' ', 1)[0]} ..."


def report_lines(failures: Sequence[Failure], script: str) -> list[str]:
    """Return the lines of the report: the rank that failed first and why, then the others; ``failures`` in order."""
    first, *others = failures
    lines = [f"rank {first.place} of {script} failed first: {first.how}"]
    if first.departed:
        departed = [failure for failure in failures if failure.departed]
        places = ", ".join(failure.place for failure in sorted(departed, key=lambda failure: failure.rank))
        several = "s" if len(departed) > 1 else ""
        lines = [f"rank{several} {places} of {script} exited with code 0 while others were training"]
        others = [failure for failure in others if not failure.departed]
    ends: dict[str, list[Failure]] = {}
    for failure in others:
        if failure.stopped:
            end = "stopped by the launcher"
        elif failure.message and failure.message == first.message:
            end = "the same"
        else:
            later = max(failure.at - first.at, 0.0)  # a lost connection may be noticed before the peer's exit
            end = f"{failure.message or failure.how}, {later:.1f} s later"
        ends.setdefault(end, []).append(failure)
    for end, ended in ends.items():
        plural = "s" if len(ended) > 1 else ""
        ranks = ", ".join(failure.place for failure in sorted(ended, key=lambda failure: failure.rank))
        lines.append(f"  rank{plural} {ranks}: {end}")
    return lines


def show(
    script: str, failures: Sequence[Failure], *, log_dir: Path | str | None, adds_local_rank: bool
) -> None:
    """Log the report of `report_lines`, after the first failure's traceback unless the rank printed it; ``failures`` in
    order."""
    first, *others = failures
    lines = report_lines(failures, script)
    if adds_local_rank and _is_refused_option(first):
        lines.append(
            f"  the command gives every rank {LOCAL_RANK_OPTION}=N; if {script} does not accept it, start it with: "
            "deepspeed --no_local_rank ..."
        )
    if log_dir is not None:
        lines.append(f"  full output of the ranks: {log_dir}{os.sep}*_rank*.log")
    if first.traceback and not first.on_screen:
        sys.stderr.write(first.traceback)
    for failure in others:
        if failure.traceback and not failure.on_screen:
            logger.debug("rank %d:\n%s", failure.rank, failure.traceback)
    logger.error("\n".join(lines))


def write_report(path: Path, failures: Iterable[Failure]) -> None:
    """Write one machine's failures, including ranks that left, for the command that reports all machines."""
    path.write_text(json.dumps([asdict(failure) for failure in failures]), encoding="utf-8")


def read_report(text: str, host: str) -> list[Failure]:
    """Parse the text that `write_report` wrote on ``host``; empty if it is malformed."""
    try:
        return [Failure(**{**entry, "host": host}) for entry in json.loads(text)]
    except (ValueError, TypeError):
        return []
