"""Several models behind one address: requests choose by ``model``, and no model waits for another."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from deepspeed.inference.generation.generator import divide
from deepspeed.inference.serving.service import Service
from tests.inference.standin import Bytes, Parrot, served
from tests.inference.test_embedding_routes import Vectors
from tests.inference.test_service import wait_for

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from tests.inference.test_http import events, reply, server


class Shouting(Bytes):
    """Other texts for the same tokens."""

    template = ""

    def decode(self, tokens: list[int]) -> str:
        return super().decode(tokens).upper()


def test_requests_choose_their_model() -> None:
    loud = served(Service(Parrot()), Shouting(), name="loud/one", max_length=64, default_tokens=3)
    with server(others=[loud], default_tokens=5) as running:
        listed = running.call("GET", "/v1/models")[1]["data"]
        assert [(each["id"], each["max_model_len"], each["type"]) for each in listed] == [
            ("parrot", 1024, "chat"),
            ("loud/one", 64, "language"),
        ]
        assert running.call("GET", "/v1/models/loud/one")[1] == listed[1]
        for model, told, text in (("", "parrot", reply(5)), ("loud/one", "loud/one", reply(3).upper())):
            found = running.post({"prompt": "a", "model": model})[1]
            assert (found["model"], found["choices"][0]["text"]) == (told, text)
            body = {"input": "a", "model": model, "max_output_tokens": 2}
            found = running.post(body, "/v1/responses")[1]
            assert (found["model"], found["output"][0]["content"][0]["text"]) == (told, text[:2])
        text = running.post({"prompt": "a", "model": "loud/one", "stream": True})[1]
        assert "".join(each["choices"][0]["text"] for each in events(text)) == reply(3).upper()
        assert running.post({"prompt": "a" * 100})[0] == 200
        assert running.post({"prompt": "a" * 100, "model": "loud/one"})[0] == 400
        assert running.post({"prompt": "a", "model": "loud/one"}, "/tokenize")[1]["max_model_len"] == 64
        body = {"tokens": [97], "model": "loud/one"}
        assert running.post(body, "/detokenize")[1] == {"prompt": "A"}
        assert running.call("GET", "/tokenizer_info?model=nobody")[0] == 404
        messages = [{"role": "user", "content": "a"}]
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            status, found = running.post({**body, "model": "nobody"}, path)
            assert (status, found["error"]["code"], found["error"]["param"]) == (
                404,
                "model_not_found",
                "model",
            )
            assert "no model 'nobody'; available: 'parrot', 'loud/one'" in found["error"]["message"]
        page = running.call("GET", "/metrics")[1]
    found = dict(re.findall(r'^deepspeed_requests_total{model_name="(.*)",reason="length"} (\d)', page, re.M))
    assert found == {"parrot": "3", "loud/one": "3"}


def test_vectors_of_each() -> None:
    small = served(Service(Vectors(2)), name="small")
    scores = served(Service(Vectors(3)), name="scores", encode_pair=lambda *_: [1])
    with server(Vectors(4), others=[small, scores]) as running:
        for model, size in (("", 4), ("small", 2)):
            found = running.post({"input": [[5]], "model": model}, "/v1/embeddings")[1]
            assert len(found["data"][0]["embedding"]) == size and found["model"] == (model or "parrot")
        status, found = running.post({"input": "a", "model": "scores"}, "/v1/embeddings")
        assert status == 400 and "scores pairs of texts" in found["error"]["message"]
        assert running.call("GET", "/")[0] == 200  # to try those that generate


def test_a_model_that_computes_for_long_holds_up_nobody() -> None:
    """A forward of one takes a second; all answers of the other, and of the server, come in between."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(Parrot):
        def step(self) -> Any:
            entered.set()
            assert leave.wait(60)
            return super().step()

    slow = served(Service(Slow()), name="slow")
    with server(others=[slow]) as running:
        answers: list[int] = []
        body = {"prompt": "a" * 500, "model": "slow", "max_tokens": 1}
        client = threading.Thread(target=lambda: answers.append(running.post(body)[0]))
        client.start()
        assert entered.wait(30)
        for _ in range(3):
            assert running.post({"prompt": "a", "max_tokens": 20})[0] == 200
            assert running.call("GET", "/health")[0] == 200
        assert answers == []
        leave.set()
        client.join(30)
        assert answers == [200]


def test_a_model_that_fails_leaves_the_others() -> None:
    broken = served(Service(Parrot(fails_at=1)), name="broken")
    with server(others=[broken]) as running:
        assert running.call("GET", "/ready")[0] == 200
        status, found = running.post({"prompt": "a", "model": "broken"})
        assert status == 503 and "the device is gone" in found["error"]["message"]
        wait_for(lambda: broken.service.failure is not None)
        assert running.post({"prompt": "a", "model": "broken"})[0] == 503
        assert running.post({"prompt": "a", "max_tokens": 1})[0] == 200
        for path in ("/health", "/ready"):
            assert running.call("GET", path)[0] == running.call("GET", f"{path}?model=broken")[0] == 503
            assert running.call("GET", f"{path}?model=parrot") == (200, {"status": "ok"})
            assert running.call("GET", f"{path}?model=nobody")[0] == 404
        page = running.call("GET", "/metrics")[1]
    assert 'deepspeed_healthy{model_name="broken"} 0' in page
    assert 'deepspeed_healthy{model_name="parrot"} 1' in page


def test_all_are_drained() -> None:
    other = served(Service(Parrot(delay=0.02)), name="other")
    with server(Parrot(delay=0.02), others=[other]) as running:
        found: list[Any] = []
        bodies = [{"prompt": "a", "model": model, "max_tokens": 30} for model in ("parrot", "other")]
        clients = [
            threading.Thread(target=lambda body=body: found.append(running.post(body))) for body in bodies
        ]
        for client in clients:
            client.start()
        wait_for(lambda: running.engine.forwards > 2 and bool(other.service.state()["requests"]))
        running.stop()
        time.sleep(0.1)
        assert running.post({"prompt": "a", "model": "other"})[0] == 503
        for client in clients:
            client.join(30)
        assert [(status, answer["choices"][0]["text"]) for status, answer in found] == [(200, reply(30))] * 2


def test_memory_is_divided_by_shares() -> None:
    assert divide(100, [1000, 1000], [1, 1]) == [50, 50]
    assert divide(100, [1000, 1000], [3, 1]) == [75, 25]
    assert divide(100, [10, 1000, 1000], [1, 1, 1]) == [10, 45, 45]  # what one cannot use is the others'
    assert divide(100, [10, 40, 1000], [1, 1, 1]) == [10, 40, 50]
    assert divide(100, [5, 6], [1, 9]) == [5, 6] and divide(100, [], []) == []
    assert divide(7, [1000, 1000], [1, 1]) == [3, 4] and divide(10, [100], [0.5]) == [10]
