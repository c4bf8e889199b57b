"""``/v1/embeddings`` without a model: many vectors block no other request, and disconnected clients are dropped."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from deepspeed.inference.scheduling.requests import Request
from tests.inference.standin import Bytes, Parrot
from tests.inference.test_http import server
from tests.inference.test_service import wait_for

PATH = "/v1/embeddings"


class Vectors(Parrot):
    """Gives a vector that a prompt's first token tells; ``nan_at``: the token whose vector is not finite."""

    def __init__(self, size: int = 4, *, nan_at: int = -1, **more: Any) -> None:
        super().__init__(**more)
        self.size, self.nan_at = size, nan_at

    def submit(self, prompt: Any, params: Any) -> Request:
        request = super().submit(prompt, params)
        request.pooled = torch.arange(1.0, self.size + 1) * (prompt[0] + 1)
        if prompt[0] == self.nan_at:
            request.pooled[-1] = float("nan")
        return request


class Counting(Bytes):
    """Begins each text with a special token, and counts how often it is called."""

    calls = 0

    def encode(self, text: str) -> list[int]:
        return [1, *self.words(text)]

    def words(self, text: str) -> list[int]:
        self.calls += 1
        return list(text.encode())


@pytest.mark.parametrize(
    ("more", "tokens", "calls"),
    [({}, 5, 1), ({"truncate_prompt_tokens": -1}, 5, 1), ({"truncate_prompt_tokens": 3}, 3, 2)],
)
def test_only_a_text_that_is_cut_is_tokenized_twice(more: dict[str, Any], tokens: int, calls: int) -> None:
    tokenizer = Counting()
    with server(Vectors(), tokenizer=tokenizer) as running:
        status, found = running.post({"input": "abcd", **more}, PATH)
        assert status == 200 and found["usage"]["prompt_tokens"] == tokens and tokenizer.calls == calls


def test_many_vectors_do_not_hold_up_the_event_loop() -> None:
    """300 vectors of 4,096 numbers take seconds of processor time, of which the loop waits for little at a time."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            began = time.process_time()
            await asyncio.sleep(0.001)
            ticks.append(time.process_time() - began)

    kept: list[asyncio.Task[None]] = []
    begun = time.process_time()
    with server(
        Vectors(4096), ready=lambda _: kept.append(asyncio.get_running_loop().create_task(tick()))
    ) as running:
        connection = running.connect()
        connection.request("POST", PATH, json.dumps({"input": [[each] for each in range(300)]}))
        answer = connection.getresponse().read()  # parsed after the ticks: it is one long call
        kept[0].get_loop().call_soon_threadsafe(kept[0].cancel)
        spent = time.process_time() - begun
        assert max(ticks) < 0.25 < spent
        data = json.loads(answer)["data"]
        expected = torch.arange(1.0, 4097)
        assert [each["index"] for each in data] == list(range(300))
        assert data[299]["embedding"] == pytest.approx((expected / expected.norm()).tolist())


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_that_are_not_finite_are_an_error_of_the_server(encoding: str) -> None:
    with server(Vectors(nan_at=7)) as running:
        body = {"input": [[1], [7]], "encoding_format": encoding}
        status, found = running.post(body, PATH)
        assert status == 500 and found["error"]["type"] == "server_error"
        assert "input.1 a non-finite vector" in found["error"]["message"]
        assert running.post({"input": [[1]], "dimensions": 2}, PATH)[0] == 400
        assert running.post({**body, "input": [[1]]}, PATH)[0] == 200


def test_a_client_that_leaves_is_not_computed_for() -> None:
    with server(Vectors(delay=0.01), max_requests=4) as running:
        connection = running.connect()
        connection.request("POST", PATH, json.dumps({"input": [[each] for each in range(1000)]}))
        wait_for(lambda: running.engine.forwards > 2)
        connection.sock.close()
        connection.close()
        wait_for(lambda: not running.service._tickets and not running.engine.has_work)
        forwards = running.engine.forwards
        time.sleep(0.1)
        assert running.engine.forwards == forwards < 500
