"""Requests for a server of OpenAI's API, and what their clients see: the load of serving.py.

An open loop: requests arrive by a Poisson process, whatever the server does, so that a slow server has a longer queue.
Times count from the planned arrival of a request, so a client that starts late does not hide a wait.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from first_token import percentile

SPAN = 16
"""Tokens of the moving average of the times between tokens, as in the benchmarks of FastGen."""
PARTS = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Wanted:
    """A request. ``at``: its arrival, in seconds after the first; ``tokens``: of its answer."""

    at: float
    prompt: list[int]
    tokens: int


@dataclass
class Told:
    """What the client of a request saw. ``times``: from its arrival to each piece of its answer, in seconds."""

    tokens: int
    times: list[float] = field(default_factory=list)
    text: str = ""
    error: str | None = None

    @property
    def gaps(self) -> list[float]:
        """Return the times between pieces; most servers send one for each token."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    def meets(self, first: float, between: float) -> bool:
        """Return whether the first token came within ``first`` seconds, and the moving average of the times between
        tokens never exceeded ``between``.

        FastGen's measure (Holmes et al., 2024, arXiv:2401.08671) sets a limit to the prompt and one to this average.
        """
        if self.error is not None or not self.times or self.times[0] > first:
            return False
        average = None
        for gap in self.gaps:
            average = gap if average is None else average + 2 / (SPAN + 1) * (gap - average)
            if average > between:
                return False
        return True


def requests(
    rate: float,
    seconds: float,
    vocabulary: int,
    prompts: tuple[int, int],
    answers: tuple[int, int],
    seed: int,
) -> list[Wanted]:
    """Draw requests of ``seconds`` with ``rate`` per second: many short ones and few long ones (lengths are uniform in
    their logarithm), between the limits of ``prompts`` and ``answers``."""
    draw, at, found = random.Random(f"{rate} {seed}"), 0.0, list[Wanted]()

    def length(limits: tuple[int, int]) -> int:
        return round(math.exp(draw.uniform(*map(math.log, limits))))

    while at < seconds:
        prompt = [draw.randrange(vocabulary) for _ in range(length(prompts))]
        found.append(Wanted(at, prompt, length(answers)))
        at += draw.expovariate(rate)
    return found


def ask(port: int, body: dict[str, Any], told: Told, began: float) -> None:
    """Stream one completion into ``told``; times count from ``began``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read()[:200]!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now, part = time.perf_counter() - began, json.loads(line[6:])
            if "error" in part:
                raise ValueError(str(part["error"]))
            text = part["choices"][0]["text"] if part["choices"] else ""
            if text:
                told.times.append(now)
                told.text += text
    except (OSError, ValueError, http.client.HTTPException) as error:
        told.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def play(wanted: Sequence[Wanted], port: int, body: Callable[[Wanted], dict[str, Any]]) -> list[Told]:
    """Send each request at its time, each by its own thread, and return what came, in the same order."""
    answers, began = [Told(each.tokens) for each in wanted], time.perf_counter() + 0.1

    def client(each: Wanted, told: Told) -> None:
        time.sleep(max(0.0, began + each.at - time.perf_counter()))
        ask(port, body(each), told, began + each.at)

    _join([threading.Thread(target=client, args=pair) for pair in zip(wanted, answers, strict=True)])
    return answers


def play_closed(
    wanted: Sequence[Sequence[Wanted]], port: int, body: Callable[[Wanted], dict[str, Any]]
) -> tuple[list[Told], float]:
    """Let each of several clients send its requests one after the other. Returns the answers, and seconds."""
    answers, began = [[Told(each.tokens) for each in of] for of in wanted], time.perf_counter()

    def client(of: Sequence[Wanted], answered: Sequence[Told]) -> None:
        for each, told in zip(of, answered, strict=True):
            ask(port, body(each), told, time.perf_counter())

    _join([threading.Thread(target=client, args=pair) for pair in zip(wanted, answers, strict=True)])
    return [told for of in answers for told in of], time.perf_counter() - began


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def milliseconds(values: Sequence[float]) -> list[str]:
    """Return the cells of p50, p95 and p99."""
    return [f"{percentile(list(values), part) * 1e3:.0f}" if values else "" for part in PARTS]
