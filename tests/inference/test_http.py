"""The HTTP server with a real client on this machine, over a generator without a model."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from deepspeed.inference.serving.service import Service
from tests.inference.standin import REPLY, Bytes, Parrot
from tests.inference.test_service import wait_for

pytest.importorskip("fastapi", reason="the extra serve is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from deepspeed.inference.serving.app import ServerSettings, make_app  # noqa: E402


class Running:
    def __init__(self, engine: Parrot, port: int, service: Service) -> None:
        self.engine, self.port, self.service = engine, port, service

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = self.connect()
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        return self.call("POST", path, body, **headers)


@contextlib.contextmanager
def server(engine: Parrot | None = None, *, max_requests: int = 64, **more: Any) -> Iterator[Running]:
    engine = engine or Parrot()
    service = Service(engine, max_requests=max_requests).start()
    settings = ServerSettings(**{"model": "parrot", "max_length": 1024, "stop_token_ids": (0,), **more})
    app = make_app(service, Bytes(), settings)
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    wait_for(lambda: running.started)
    try:
        yield Running(engine, running.servers[0].sockets[0].getsockname()[1], service)
    finally:
        running.should_exit = True
        thread.join(30)
        service.close(drain=False)


def reply(tokens: int) -> str:
    return (REPLY * 100).encode()[:tokens].decode(errors="replace")


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_completions_whole_and_streamed() -> None:
    with server() as running:
        status, found = running.post({"prompt": "Hi", "max_tokens": 10, "temperature": 0})
        assert status == 200 and found["object"] == "text_completion" and found["model"] == "parrot"
        choice = {"index": 0, "text": reply(10), "logprobs": None, "finish_reason": "length"}
        assert found["choices"] == [choice]
        assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}
        body = {"prompt": "Hi", "max_tokens": 10, "stream": True, "stream_options": {"include_usage": True}}
        status, text = running.post(body)
        parts = events(text)
        assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == reply(10)
        assert parts[-2]["choices"][0]["finish_reason"] == "length"
        assert parts[-1]["usage"]["completion_tokens"] == 10 and parts[-1]["choices"] == []


def test_several_prompts_and_sequences() -> None:
    with server() as running:
        body = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 4, "echo": True, "logprobs": 1}
        status, found = running.post(body)
        assert status == 200
        assert [each["text"] for each in found["choices"]] == [p + reply(4) for p in ("a", "a", "bc", "bc")]
        assert found["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 4
        status, text = running.post({**body, "stream": True})
        texts = dict.fromkeys(range(4), "")
        for part in events(text):
            texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
        assert list(texts.values()) == [p + reply(4) for p in ("a", "a", "bc", "bc")]
        assert running.post({"prompt": [72, 105], "max_tokens": 2})[1]["usage"]["prompt_tokens"] == 2


def test_chats_and_stops() -> None:
    with server() as running:
        body = {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 50,
            "stop": ["wör", "x"],
        }
        status, found = running.post(body, "/v1/chat/completions")
        assert status == 200 and found["object"] == "chat.completion"
        message = {"role": "assistant", "content": "Grüße, "}
        assert found["choices"] == [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        ]
        status, text = running.post({**body, "stream": True}, "/v1/chat/completions")
        parts = [part["choices"][0] for part in events(text)]
        assert parts[0]["delta"]["role"] == "assistant" and "role" not in parts[1]["delta"]
        assert "".join(part["delta"].get("content", "") for part in parts) == "Grüße, "
        assert parts[-1]["finish_reason"] == "stop"
        wait_for(lambda: running.engine.scheduler.blocks.pool.num_free == 256)  # it has not gone on to 50


def test_refusals() -> None:
    with server(max_body_bytes=2000) as running:
        refused = [
            (b"{", 400, "body"),
            ({"max_tokens": 3}, 400, "prompt"),
            ({"prompt": ""}, 400, "empty"),
            ({"prompt": "a", "temperature": -1}, 400, "temperature"),
            ({"prompt": "a", "max_tokens": 5000}, 400, "room for 1023 tokens"),
            ({"prompt": "a" * 1500}, 400, "room for 0 tokens"),
            ({"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty"),
            ({"prompt": "a" * 3000}, 413, "2000 bytes"),
        ]
        for body, status, words in refused:
            found = running.post(body)
            assert found[0] == status and words in found[1]["error"]["message"], found
        assert running.post({"prompt": "a", "max_tokens": 1, "presence_penalty": 0, "user": "me"})[0] == 200
        assert running.call("GET", "/v1/completions")[0] == 405
        assert running.call("GET", "/nothing")[0] == 404


def test_tokens_of_access() -> None:
    with server(token="secret") as running:
        body = {"prompt": "a", "max_tokens": 1}
        assert running.post(body)[0] == running.post(body, Authorization="Bearer wrong")[0] == 401
        assert running.call("GET", "/v1/models")[0] == 401
        assert running.post(body, Authorization="Bearer secret")[0] == 200
        assert (
            running.call("GET", "/v1/models", Authorization="Bearer secret")[1]["data"][0]["id"] == "parrot"
        )
        assert running.call("GET", "/health") == (200, {"status": "ok"})


def test_back_pressure() -> None:
    with server(Parrot(delay=0.005), max_requests=2) as running:
        held = [running.connect() for _ in range(2)]
        for connection in held:
            body = json.dumps({"prompt": "a", "max_tokens": 900, "stream": True})
            connection.request("POST", "/v1/completions", body)
            assert connection.getresponse().status == 200
        assert running.post({"prompt": "a", "max_tokens": 1})[0] == 429
        assert running.post({"prompt": ["a", "b", "c"], "max_tokens": 1})[0] == 429
        for connection in held:
            connection.close()
        wait_for(lambda: not running.engine.has_work)
        assert running.post({"prompt": "a", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_their_blocks(stream: bool) -> None:
    with server(Parrot(delay=0.005)) as running:
        connection = running.connect()
        body = json.dumps({"prompt": "a", "max_tokens": 1000, "stream": stream})
        connection.request("POST", "/v1/completions", body)
        wait_for(lambda: running.engine.has_work)
        connection.sock.close()
        connection.close()
        wait_for(lambda: not running.engine.has_work)
        assert running.engine.scheduler.blocks.pool.num_free == 256
        status, text = running.call("GET", "/metrics")
        assert status == 200 and 'deepspeed_requests_total{reason="cancelled"} 1' in text


def test_a_generator_that_fails_is_answered_with_503() -> None:
    with server(Parrot(delay=0.005, fails_at=3)) as running:
        status, found = running.post({"prompt": "a", "max_tokens": 50})
        assert status == 503 and "the device is gone" in found["error"]["message"]
        assert running.post({"prompt": "a", "max_tokens": 50})[0] == 503
        status, found = running.call("GET", "/health")
        assert status == 503 and found["error"] == "the device is gone"


def test_many_requests_some_of_which_leave_or_are_malformed() -> None:
    """None is lost, none gets another's answer, and all blocks come back."""
    with server(max_requests=500) as running:
        wrong: list[Any] = []

        def client(number: int) -> None:
            for turn in range(5):
                kind = (number + turn) % 5
                if kind == 3:
                    connection = running.connect()
                    connection.request(
                        "POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 900})
                    )
                    connection.close()
                elif kind == 4:
                    if running.post(b"\xff\x00")[0] != 400:
                        wrong.append((number, turn))
                else:
                    new = 1 + (number * 7 + turn) % 40
                    status, found = running.post({"prompt": "p" * (1 + number), "max_tokens": new})
                    usage = {
                        "prompt_tokens": 1 + number,
                        "completion_tokens": new,
                        "total_tokens": 1 + number + new,
                    }
                    if status != 200 or found["usage"] != usage or found["choices"][0]["text"] != reply(new):
                        wrong.append((number, turn, status, found))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        wait_for(lambda: not running.engine.has_work and not running.service.state()["requests"])
        assert running.engine.scheduler.blocks.pool.num_free == 256
