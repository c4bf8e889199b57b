"""The load of serving.py and the checks of soak.py: their arithmetic, and a soak that finds what is wrong."""

from __future__ import annotations

import argparse
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import load
import soak
import soak_clients


def told(*times: float) -> load.Told:
    return load.Told(len(times), list(times))


def test_the_limits_of_goodput() -> None:
    assert told(0.5, 0.6, 0.7).meets(first=0.5, between=0.11)
    assert not told(0.51, 0.6).meets(first=0.5, between=1)
    assert not told().meets(first=1, between=1)
    assert not replace(told(0.1), error="status 500").meets(first=1, between=1)
    # A single pause counts by its share of the moving average: 2/17 of it, and 15/17 of what was before.
    paused = told(0.0, 0.1, 1.1)
    assert paused.meets(first=0, between=(2 * 1 + 15 * 0.1) / 17 + 1e-9)
    assert not paused.meets(first=0, between=(2 * 1 + 15 * 0.1) / 17 - 1e-9)


def test_requests_are_the_same_every_time_and_within_their_limits() -> None:
    def drawn(seed: int) -> list[load.Wanted]:
        return load.requests(50, 40, 512, (16, 256), (8, 64), seed)

    found = drawn(1)
    assert found == drawn(1) != drawn(2)
    assert 1800 < len(found) < 2200 and found[0].at == 0 and found[-1].at < 40
    prompts, answers = [len(one.prompt) for one in found], [one.tokens for one in found]
    assert min(prompts) >= 16 and 250 <= max(prompts) <= 256 and min(answers) == 8 and max(answers) == 64
    assert 56 < sorted(prompts)[len(prompts) // 2] < 72  # the middle of the logarithms: 64


class Stream(BaseHTTPRequestHandler):
    """Answers with two pieces of text, or refuses."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if self.path == "/v1/completions" and not self.server.refuses else 503)  # type: ignore[attr-defined]
        self.end_headers()
        for text in ("", " w1", " w2"):
            self.wfile.write(b'data: {"choices": [{"text": "%s"}]}\n\n' % text.encode())
        self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("refuses", [False, True])
def test_a_client_notes_the_pieces_of_its_answer(refuses: bool) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stream) as server:
        server.refuses = refuses  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            wanted = [load.Wanted(0, [1], 2), load.Wanted(0.2, [2], 2)]
            open_loop = load.play(wanted, server.server_port, lambda each: {"prompt": each.prompt})
            closed, seconds = load.play_closed([wanted, wanted], server.server_port, lambda _: {})
        finally:
            server.shutdown()
            thread.join()
    assert len(open_loop) == 2 and len(closed) == 4 and seconds > 0
    for one in [*open_loop, *closed]:
        if refuses:
            assert one.error is not None and "status 503" in one.error and not one.times
        else:
            assert one.error is None and one.text == " w1 w2" and len(one.times) == 2 and len(one.gaps) == 1


LIMITS = argparse.Namespace(growth_mb=8, growth_threads=0, growth_files=0)
REST = soak.Held(blocks=64, free_blocks=64, running=0, memory=100, threads=9, files=20, requests=5)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"memory": 108, "requests": 900, "threads": 7, "files": 19}, []),
        ({"free_blocks": 61}, ["3 of 64 blocks are not free"]),
        ({"running": 1}, ["1 requests never end"]),
        ({"memory": 109}, ["memory: 9 MB more than after the warm-up, the limit is 8 MB"]),
        ({"threads": 10, "files": 22}, ["threads: 1 more than", "files: 2 more than"]),
    ],
)
def test_what_has_leaked_is_named(changed: dict[str, Any], told: list[str]) -> None:
    found = soak.problems(REST, replace(REST, **changed), LIMITS)
    assert len(found) == len(told) and all(text in one for text, one in zip(told, found, strict=True))


def test_wrong_answers_are_told() -> None:
    case = soak_clients.Case({"prompt": "a"}, "right")
    assert soak_clients._differs(case, "right") is None
    assert "gives 'wrong', on an idle server 'right'" in (soak_clients._differs(case, "wrong") or "")
    assert soak_clients._refused(400, (400, {"error": {}}), "x") is None
    assert soak_clients._refused(400, (500, {"error": {}}), "x")
    assert soak_clients._follows("schema", '{"sure": true, "of": "no"}')
    assert not soak_clients._follows("schema", '{"sure": 1, "of": "no"}')
    assert not soak_clients._follows("pattern", "ab") and soak_clients._follows("choice", "yes")
    assert not soak_clients._apart({"a": -1.0, "b": -1.0005}) and soak_clients._apart({"a": -1.0, "b": -1.1})
