"""Explain which ranks wait for which: compare the ranks' descriptions of themselves and word the result. Pure.

The n-th collective of a group has to be the same on every member. So the first one in which two ranks differ is where
they diverged, and the others wait for a rank that has issued fewer, unless that one waits, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.base.tables import first_of
from deepspeed.comm.hangs.history import UNEVEN
from deepspeed.comm.hangs.thread_states import LOADING, RESTORING, SAVING, STARTING, HangReport

STACK_LINES = 24
SHOWN = 8
"""Ranks, parameters or stacks of one kind that are listed; the others are counted."""

STOPPED, GONE, ABSENT = "is stopped", "has ended", "has no engine"

_BRANCH = (
    "code that only some ranks run (`if rank == 0`), a condition on rank-local data, a different number of "
    "batches or backward passes, layers or parameters that only some ranks use"
)
_CAUSES = {
    LOADING: "a data loader with fewer batches on this rank, or one waiting for a worker or slow storage; give "
    "every rank the same number of batches (DistributedSampler, drop_last), and check the output of the "
    "workers",
    SAVING: "save_checkpoint called on some ranks only (it is collective), or slow or full storage",
    RESTORING: "load_checkpoint called on some ranks only (it is collective), or slow storage",
    STARTING: "ranks building different models, or waiting for a file or download",
    ABSENT: "a rank still busy before deepspeed.initialize, or one that finished training early",
    STOPPED: "Ctrl-Z, a debugger or a scheduler; `kill -CONT PID` resumes it",
    GONE: "its output says why; without the launcher, the other ranks are not stopped",
}


def explain(reports: Mapping[int, HangReport], silent: Mapping[int, str], waited_s: float) -> str:
    """Return the report; empty if no rank waits for another. `silent`: the state, if known, of ranks that did not
    answer."""
    waiting = {rank: each for rank, each in reports.items() if each.call}
    diverged = _divergences(reports)
    late = _late(reports)
    missing = {rank: text for rank, text in late.items() if rank not in waiting}
    missing.update((rank, text) for rank, text in _absent(reports, waiting).items() if rank not in missing)
    if not (waiting or silent) and not diverged and not missing:
        return ""
    locked = bool(waiting.keys() & late.keys()) and not (diverged or missing or silent)
    lines = [
        f"no progress in communication for {waited_s:.0f} s: {_headline(diverged, missing, silent, waiting, locked)}"
    ]
    lines += [f"  {text}" for text in diverged]
    lines += [f"  missing: {_missing_rank(reports[rank], missing[rank])}" for rank in _few(missing)]
    lines += [f"  missing: rank {rank} {silent[rank]}" for rank in _few(silent)]
    lines += _waiting_lines(waiting, late)
    to_show = [*missing, *silent] or list(waiting)
    for rank in _few([rank for rank in to_show if rank in reports]):
        lines += _stack(reports[rank])
    lines.append(f"  usual causes: {'; '.join(_causes(diverged, missing, silent, reports, waiting, locked))}")
    return "\n".join(lines)


def _headline(
    diverged: Sequence[str],
    missing: Mapping[int, str],
    silent: Mapping[int, str],
    waiting: Mapping[int, HangReport],
    locked: bool,
) -> str:
    """Return the first line. ``locked``: ranks wait for calls that others would issue only after the calls they
    wait in."""
    if silent:
        return f"{_ranks(sorted(silent))} {'does' if len(silent) == 1 else 'do'} not answer"
    if diverged:
        return "the ranks are in different collectives"
    if missing:
        return f"{_ranks(sorted(waiting)) or 'no rank'} waiting for {_ranks(sorted(missing))}"
    if locked or len({(each.call, *each.members) for each in waiting.values()}) > 1:
        return f"{_ranks(sorted(waiting))} wait for each other in different calls"
    return f"{_ranks(sorted(waiting))} wait, and no rank is missing"


# ---- comparing


def _histories(
    reports: Mapping[int, HangReport],
) -> dict[tuple[str, tuple[int, ...]], dict[int, dict[str, Any]]]:
    """Return the calls that the members of each group issued."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, dict[str, Any]]] = {}
    for rank, each in reports.items():
        for group in each.groups:
            found.setdefault((group["name"], tuple(group["ranks"])), {})[rank] = group
    return found


def _numbered(group: Mapping[str, Any]) -> dict[int, list[Any]]:
    """Return calls by their number in the group, from 1."""
    first = group["count"] - len(group["calls"]) + 1
    return dict(enumerate(group["calls"], first))


def _divergences(reports: Mapping[int, HangReport]) -> list[str]:
    """Return a line for each group whose members issued different collectives, with the first difference."""
    lines = []
    for (_, ranks), members in _histories(reports).items():
        calls = {rank: _numbered(group) for rank, group in members.items()}
        shared = set.intersection(*map(set, calls.values())) if len(calls) > 1 else set()
        for number in sorted(shared):
            kinds: dict[tuple[Any, ...], list[int]] = {}
            for rank in sorted(calls):
                kinds.setdefault(tuple(calls[rank][number][:4]), []).append(rank)
            if len(kinds) > 1:
                lines.append(_difference(number, ranks, kinds, calls))
                break
    return lines


def _difference(
    number: int,
    ranks: Sequence[int],
    kinds: Mapping[tuple[Any, ...], list[int]],
    calls: Mapping[int, Mapping[int, list[Any]]],
) -> str:
    (first, these), (second, those), *_ = kinds.items()
    names = ("another operation", "another size", "another dtype", "another root")
    what = next(name for name, a, b in zip(names, first, second, strict=True) if a != b)
    one, other = calls[these[0]], calls[those[0]]
    if tuple(one.get(number + 1, ())[:4]) == second and tuple(other.get(number + 1, ())[:4]) == first:
        what = "another order"
    texts = [
        f"{_ranks(who)} issued {call_text(kind)}{_phase(calls[who[0]][number])}"
        for kind, who in kinds.items()
    ]
    return f"{what} in collective #{number} of ranks {_members(ranks)}: {', '.join(texts)}"


def _phase(call: Sequence[Any]) -> str:
    return f" in {call[4]}" if call[4] else ""


def _late(reports: Mapping[int, HangReport]) -> dict[int, str]:
    """Return the ranks that have issued fewer collectives of a group than another member, and the one they lack."""
    late: dict[int, str] = {}
    histories = _histories(reports)
    alike = Counter(ranks for _, ranks in histories)
    for (name, ranks), members in histories.items():
        ahead = max(members.values(), key=lambda group: group["count"])
        for rank in ranks:
            own = members.get(rank)
            count = own["count"] if own else 0
            if count >= ahead["count"] or rank not in reports:
                continue
            expected = _numbered(ahead).get(count + 1)
            text = f"{call_text(expected)} " if expected else ""
            last = own["calls"][-1] if own and own["calls"] else None
            after = f", its last one was {call_text(last)}" if last else ""
            group = f"group {name}, " if alike[ranks] > 1 else ""
            late.setdefault(
                rank, f"has not issued {text}(#{count + 1} of {group}ranks {_members(ranks)}{after})"
            )
    return late


def _absent(reports: Mapping[int, HangReport], waiting: Mapping[int, HangReport]) -> dict[int, str]:
    """Return ranks that do not communicate although a member of theirs waits, for calls without a history."""
    absent: dict[int, str] = {}
    for each in waiting.values():
        for rank in each.members:
            if rank in reports and rank not in waiting:
                absent.setdefault(rank, f"is not in {each.call}")
    return absent


# ---- words


def call_text(call: Sequence[Any]) -> str:
    """Format a call, such as `all_reduce of 12 float32`."""
    operation, numel, dtype, root = call[:4]
    size = f" of {numel} {dtype}" if numel not in (0, UNEVEN) else f" of {dtype}" if dtype else ""
    return f"{operation}{size}" + (f" with root {root}" if root is not None else "")


def _who(each: HangReport) -> str:
    return f"rank {each.rank} ({each.host}, process {each.pid})"


def _missing_rank(each: HangReport, lacks: str) -> str:
    where = f", at {each.at}" if each.at else ""
    module = f", in module {each.module}" if each.module else ""
    position = f"; {each.position}" if each.position else ""
    return f"{_who(each)} {lacks}; it is {each.doing}{module}{where}{position}"


def _waiting_lines(waiting: Mapping[int, HangReport], late: Mapping[int, str]) -> list[str]:
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(waiting):
        each = waiting[rank]
        parameters = ", ".join(each.parameters[:SHOWN]) + (", ..." if len(each.parameters) > SHOWN else "")
        facts = (
            f"in {each.call}" + (f" among ranks {_members(each.members)}" if each.members else ""),
            each.position,
            "" if "other code" in each.doing else each.doing,
            f"module {each.module}" if each.module else "",
            f"parameters {parameters}" if parameters else "",
            f"at {each.at}" if each.at else "",
            late.get(rank, ""),
        )
        alike.setdefault(tuple(filter(None, facts)), []).append(rank)
    return [f"  waiting: {_ranks(ranks)} {'; '.join(facts)}" for facts, ranks in alike.items()]


def _stack(each: HangReport) -> list[str]:
    shown = each.stack[-STACK_LINES:]
    return [f"  stack of {_who(each)}, innermost last:", *(f"  {line}" for line in shown)]


def _causes(
    diverged: Sequence[str],
    missing: Mapping[int, str],
    silent: Mapping[int, str],
    reports: Mapping[int, HangReport],
    waiting: Mapping[int, HangReport],
    locked: bool,
) -> list[str]:
    doing = [reports[rank].doing for rank in missing] + [each.doing for each in waiting.values()]
    found = [
        text for key, text in _CAUSES.items() if key in doing or any(key in fact for fact in silent.values())
    ]
    if locked:
        found.append(
            "process groups used in different orders by different ranks; all ranks must use them in the same order"
        )
    if diverged or (not found and (missing or len({each.call for each in waiting.values()}) > 1)):
        found.append(_BRANCH)
    return found or ["a slow or blocked network between the hosts, or a device that is still computing"]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {_members(ranks)}" if ranks else ""


def _members(ranks: Sequence[int]) -> str:
    """Format ranks as `0, 1` or `0-7`."""
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return first_of(ranks, SHOWN)


def _few(ranks: Any) -> list[int]:
    return sorted(ranks)[:SHOWN]
