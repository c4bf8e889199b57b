"""The HTTP server with a real client on this machine, over a generator without a model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import http.client
import json
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.clients import RequestLog
from deepspeed.inference.serving.models import Models, ServedModel
from deepspeed.inference.serving.service import Service
from tests.inference.standin import REPLY, Bytes, Parrot, served
from tests.inference.test_bodies import HOSTILE
from tests.inference.test_service import wait_for

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from deepspeed.inference.serving.app import ServerSettings, make_app
from deepspeed.inference.serving.listening import Certificate, Listener, make_listener


class Running:
    def __init__(
        self, engine: Parrot, service: Service, listener: Listener, address: str, thread: threading.Thread
    ) -> None:
        self.engine, self.service, self.listener, self.thread = engine, service, listener, thread
        self.port = int(address.rpartition(":")[2])

    def stop(self) -> None:
        """As SIGTERM does."""
        self.listener.should_exit = True

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
def server(
    engine: Parrot | None = None,
    *,
    max_requests: int = 64,
    request_seconds: float | None = None,
    log: Callable[[str], object] | None = None,
    certificate: Certificate | None = None,
    tokenizer: Bytes | None = None,
    drain_seconds: float = 5.0,
    ready: Callable[[str], None] | None = None,
    others: Sequence[ServedModel] = (),
    sockets: list[socket.socket] | None = None,
    **more: Any,
) -> Iterator[Running]:
    engine = engine or Parrot()
    own = Service(engine, max_requests=max_requests, request_seconds=request_seconds)
    known = {each.name for each in dataclasses.fields(ServerSettings)}
    settings = ServerSettings(**{name: value for name, value in more.items() if name in known})
    of_model = {name: value for name, value in more.items() if name not in known}
    model = served(own, tokenizer, **of_model)
    models = Models([model, *others])
    service, app = models.services.start(), make_app(models, settings)
    addresses: queue.Queue[str] = queue.Queue()

    def announce(address: str) -> None:
        if ready is not None:
            ready(address)
        addresses.put(address)

    listener = make_listener(
        RequestLog(app, log),
        service,
        certificate=certificate,
        host="127.0.0.1",
        port=0,
        drain_seconds=drain_seconds,
        ready=announce,
    )
    thread = threading.Thread(target=listener.run, args=(sockets,), daemon=True)
    thread.start()
    running = Running(engine, own, listener, addresses.get(timeout=30), thread)
    try:
        yield running
    finally:
        running.stop()
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
        told = found["choices"][2]["logprobs"]
        assert (
            told["token_logprobs"] == [None, -0.25] + [-0.5] * 4
        )  # nothing predicts the prompt's first token
        assert told["tokens"][:3] == ["b", "c", "G"] and told["text_offset"] == [0, 1, 2, 3, 4, 5]
        only = running.post({**body, "max_tokens": 0})[1]
        assert [each["text"] for each in only["choices"]] == ["a", "a", "bc", "bc"]
        assert only["choices"][2]["logprobs"]["token_logprobs"] == [None, -0.25]
        assert only["choices"][2]["finish_reason"] == "length" and only["usage"]["completion_tokens"] == 0
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
            ({"prompt": "a", "presence_penalty": 2.5}, 400, "presence_penalty"),
            (
                {"prompt": "a", "temperatur": 0.5},
                400,
                "unknown field 'temperatur': did you mean 'temperature'?",
            ),
            ({"prompt": "a", "n" * 1500: 1}, 400, "unknown field 'nnn"),
            ({"prompt": "a" * 3000}, 413, "2000 bytes"),
        ]
        for body, status, words in refused:
            found = running.post(body)
            assert found[0] == status and words in found[1]["error"]["message"], found
            assert len(str(found)) < 500
        assert running.post({"prompt": "a", "max_tokens": 1, "presence_penalty": 0, "user": "me"})[0] == 200
        assert running.call("GET", "/v1/completions")[0] == 405
        for method, path, expected in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
            status, found = running.call(method, path)
            assert status == expected and found["error"]["message"].startswith(f"{method} {path}: ")


def test_too_large_bodies_are_refused_before_they_are_there() -> None:
    """By the length that they announce, and in chunks by what has come."""
    with server(max_body_bytes=2000) as running:
        for headers, begin in (
            ({"Content-Length": "1000000"}, b"{"),
            ({"Transfer-Encoding": "chunked"}, b"1000\r\n" + b" " * 4096 + b"\r\n"),
        ):
            connection = running.connect()
            connection.putrequest("POST", "/v1/completions")
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(begin)  # the rest never comes
            assert connection.getresponse().status == 413
            connection.close()


def test_nulls_are_what_is_not_said() -> None:
    with server() as running:
        names = (
            "temperature",
            "top_p",
            "n",
            "stop",
            "seed",
            "stream",
            "stream_options",
            "logprobs",
            "best_of",
            "echo",
        )
        body = {"prompt": "a", "max_tokens": 3, **dict.fromkeys(names), "logit_bias": None, "tools": None}
        assert running.post(body)[1]["choices"][0]["text"] == reply(3)
        assert running.post({**body, "best_of": 2, "n": 2})[0] == 200


def test_logprobs() -> None:
    with server() as running:
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "logprobs": 0}
        told = running.post(body)[1]["choices"][0]["logprobs"]
        assert told == {
            "tokens": ["G", "r", "\ufffd"],
            "token_logprobs": [-0.5] * 3,
            "top_logprobs": None,
            "text_offset": [0, 1, 2],
        }
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "logprobs": True}
        _, found = running.post(body, "/v1/chat/completions")
        content = found["choices"][0]["logprobs"]["content"]
        assert content[0] == {"token": "G", "logprob": -0.5, "bytes": [71], "top_logprobs": []}
        assert content[2]["bytes"] is None  # half of a character
        _, text = running.post({**body, "stream": True}, "/v1/chat/completions")
        streamed = [part["choices"][0]["logprobs"]["content"] for part in events(text)]
        assert sum(streamed, []) == content


def test_an_impossible_token_has_a_logprob_that_json_has() -> None:
    engine = Parrot()
    engine.logprob = -math.inf
    with server(engine) as running:
        body = {"prompt": "a", "max_tokens": 2, "logprobs": 1}
        assert running.post(body)[1]["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0] * 2
        assert "Infinity" not in running.post({**body, "stream": True})[1]


def test_contents_in_parts() -> None:
    with server() as running:

        def ask(*messages: Any) -> tuple[int, Any]:
            return running.post({"messages": messages, "max_tokens": 1}, "/v1/chat/completions")

        def text(each: str) -> dict[str, str]:
            return {"type": "text", "text": each}

        whole = ask({"role": "user", "content": "one two"})[1]["usage"]["prompt_tokens"]
        parts = ask({"role": "user", "content": [text("one"), text(" two")]})
        assert parts[0] == 200 and parts[1]["usage"]["prompt_tokens"] == whole
        assert ask({"role": "user", "content": "a"}, {"role": "assistant", "content": None})[0] == 200
        for message, words in (
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
                "'image_url' are not supported",
            ),
            ({"content": "a"}, "messages.0.role is missing"),
            ({"role": "user", "content": 3}, "messages.0.content must be"),
        ):
            status, found = ask(message)
            assert status == 400 and words in found["error"]["message"], found


def test_what_nobody_should_send() -> None:
    """Each is refused or answered, and the server keeps running."""
    with server(max_requests=8) as running:
        deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for body, status in (
            (b'{"prompt": "\\ud800", "max_tokens": 1}', 400),  # half of a pair of surrogates
            (b'{"prompt": "a", "temperature": NaN}', 400),
            (b'{"prompt": "a", "temperature": 1e999, "max_tokens": 1}', 400),
            (b'{"prompt": "a", "repetition_penalty": 1e-300, "max_tokens": 1}', 400),
            (b'{"prompt": "a", "temperature": 1e-300, "max_tokens": 1}', 200),
            (b'{"prompt": "a", "top_k": 1' + b"0" * 30 + b', "max_tokens": 1}', 200),
            (b'{"prompt": "a", "seed": -1' + b"0" * 30 + b', "max_tokens": 1}', 200),
            (deep, 400),
            (b'{"prompt": [0.5, 0.5]}', 400),
            (b'{"prompt": [[], []]}', 400),
            (b'{"prompt": "a", "temperature": 1' + b"0" * 90 + b'.5, "max_tokens": 1}', 400),
            (b'{"prompt": "a", "model": "\\ud800"}', 400),
            (json.dumps({"prompt": "a", "model": "m" * 100_000}).encode(), 404),
            (json.dumps({"prompt": "a", "stop": ["x"] * 17}).encode(), 400),
            (json.dumps({"prompt": "a", "stop": "x" * 1001}).encode(), 400),
            (json.dumps({"prompt": "a", "tool_choice": "required"}).encode(), 400),
            (json.dumps({"prompt": "a", "guided_json": 3}).encode(), 400),
            (json.dumps({"prompt": "a", "best_of": 3}).encode(), 400),
            (json.dumps({"prompt": ["a"] * 50_000}).encode(), 400),
            (json.dumps({"prompt": "a", "n": 128}).encode(), 400),
        ):
            found = running.post(body)
            assert found[0] == status, (body[:60], found)
        assert running.post({"prompt": "a", "max_tokens": 3})[1]["choices"][0]["text"] == reply(3)


def test_a_body_that_does_not_come() -> None:
    with server(body_seconds=0.1) as running, socket.create_connection(("127.0.0.1", running.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        raw.settimeout(10)
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def test_headers_without_end() -> None:
    with server() as running, socket.create_connection(("127.0.0.1", running.port)) as raw:
        raw.settimeout(10)
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\n" + b"X: " + b"a" * 1_000_000)
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
        assert running.post({"prompt": "a", "max_tokens": 1})[0] == 200


def test_a_tokenizer_that_takes_its_time_stops_nobody() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(Bytes):
        def encode(self, text: str) -> list[int]:
            if text == "slow":
                entered.set()
                assert leave.wait(30)
            return super().encode(text)

    with server(tokenizer=Slow()) as running:
        found: list[int] = []
        slow = threading.Thread(
            target=lambda: found.append(running.post({"prompt": "slow", "max_tokens": 1})[0])
        )
        slow.start()
        assert entered.wait(30)
        assert running.post({"prompt": "a", "max_tokens": 1})[0] == 200
        leave.set()
        slow.join(30)
        assert found == [200]


def test_requests_are_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """While long ones are parsed, as many as want to, others are answered."""
    entered, leave, parse = threading.Semaphore(0), threading.Event(), protocol.parse

    def slow(kind: Any, body: bytes) -> Any:
        if len(body) > 100_000:
            entered.release()
            assert leave.wait(30)
        return parse(kind, body)

    monkeypatch.setattr(protocol, "parse", slow)
    with server(max_length=512) as running:
        found: list[int] = []
        clients = [
            threading.Thread(target=lambda: found.append(running.post({"prompt": "a" * 200_000})[0]))
            for _ in range(4)
        ]
        for client in clients:
            client.start()
        assert entered.acquire(timeout=30) and entered.acquire(timeout=30)
        assert running.call("GET", "/health")[0] == 200
        assert running.post({"prompt": "a", "max_tokens": 1})[0] == 200
        leave.set()
        for client in clients:
            client.join(30)
        assert found == [400] * 4


def test_long_bodies_do_not_hold_up_the_event_loop() -> None:
    """While many requests are read and refused, in 2.2 s of computing, the process computes for at most 3.5 % of that
    (77 ms; alone: 1.4 to 2.1 %) before the loop continues.

    Processor time, which other processes of this machine do not change, as a share, which its speed does not change.
    """
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            began = time.process_time()
            await asyncio.sleep(0.001)
            ticks.append(time.process_time() - began)

    kept: list[asyncio.Task[None]] = []
    names = ("lists", "fewer tokens", "fewer lists", "fewer messages", "texts", "escapes without end", "name")
    long = [HOSTILE[name] for name in names] * 4
    gc.collect()
    gc.freeze()  # as ``ds serve`` does
    started = time.process_time()
    with server(ready=lambda _: kept.append(asyncio.get_running_loop().create_task(tick()))) as running:
        found: list[int] = []
        clients = [
            threading.Thread(target=lambda body=body: found.append(running.post(body)[0])) for body in long
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        assert found == [400] * len(long)
        kept[0].get_loop().call_soon_threadsafe(kept[0].cancel)
    assert max(ticks) < 0.035 * (time.process_time() - started)


def test_prompts_after_one_that_does_not_fit_are_not_tokenized() -> None:
    class Counting(Bytes):
        encoded = 0

        def encode(self, text: str) -> list[int]:
            self.encoded += 1
            return super().encode(text)

    tokenizer = Counting()
    with server(tokenizer=tokenizer) as running:
        status, found = running.post({"prompt": ["a", "b" * 2000, *"cdef"], "max_tokens": 1})
        assert status == 400 and found["error"]["code"] == "context_length_exceeded"
        assert (
            "maximum context length is 1024 tokens: the prompt of 2000 leaves room for 0 tokens"
            in (found["error"]["message"])
        )
        assert tokenizer.encoded == 2


def test_requests_are_checked_beside_the_event_loop() -> None:
    """The check reads the whole prompt for each of its sequences."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(Parrot):
        def check(self, prompt: Any, params: Any) -> None:
            entered.set()
            assert leave.wait(30)
            super().check(prompt, params)

    with server(Slow()) as running:
        found: list[int] = []
        body = {"prompt": "a", "max_tokens": 1, "n": 2}
        client = threading.Thread(target=lambda: found.append(running.post(body)[0]))
        client.start()
        assert entered.wait(30)
        assert running.call("GET", "/health")[0] == 200
        leave.set()
        client.join(30)
        assert found == [200]


def test_a_client_that_leaves_before_the_first_event() -> None:
    """Its stream is never begun, and yet its sequence ends."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(Bytes):
        def encode(self, text: str) -> list[int]:
            entered.set()
            assert leave.wait(30)
            return super().encode(text)

    with server(Parrot(delay=0.005), tokenizer=Slow()) as running:
        connection = running.connect()
        connection.request(
            "POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1000, "stream": True})
        )
        assert entered.wait(30)
        connection.close()
        time.sleep(0.05)  # the server hears of it while the tokenizer works
        leave.set()
        wait_for(lambda: 'reason="cancelled"} 1' in running.call("GET", "/metrics")[1])
        wait_for(lambda: not running.engine.has_work)


def test_cancelled_while_the_prompt_is_computed() -> None:
    with server(Parrot(delay=0.05)) as running:
        connection = running.connect()
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a" * 900, "max_tokens": 9}))
        wait_for(lambda: any(0 < each.computed < 900 for each in running.engine.scheduler.running))
        connection.close()
        wait_for(lambda: not running.engine.has_work)
        assert running.engine.scheduler.blocks.pool.num_free == 256
        assert running.engine.forwards < 15  # the prompt alone takes as many


def test_a_reader_that_does_not_read_stops_nobody() -> None:
    """Its responses stay in memory; its sequences end, and others are served."""
    with server(max_requests=8) as running, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", running.port))
        body = json.dumps({"prompt": "a", "n": 8, "max_tokens": 1000, "stream": True, "logprobs": 1}).encode()
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            + f"{len(body)}\r\n\r\n".encode()
            + body
        )
        wait_for(lambda: running.engine.has_work)
        wait_for(lambda: not running.service.state()["requests"])
        assert running.post({"prompt": "a", "max_tokens": 3})[1]["choices"][0]["text"] == reply(3)
        assert running.engine.scheduler.blocks.pool.num_free == 256


def test_the_model_by_its_name() -> None:
    with server(name="some/parrot") as running:
        assert running.call("GET", "/v1/models/some/parrot")[1]["id"] == "some/parrot"
        assert running.call("GET", "/v1/models/")[1] == running.call("GET", "/v1/models")[1]
        status, found = running.call("GET", "/v1/models/other")
        assert status == 404 and "available: 'some/parrot'" in found["error"]["message"]
        for path, asked in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ):
            for name, expected in (("some/parrot", 200), ("", 200), (None, 200), ("gpt-9", 404)):
                status, found = running.post({**asked, "model": name}, path)
                assert status == expected, (path, name, found)
            assert found["error"]["code"] == "model_not_found" and found["error"]["param"] == "model"


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
        assert running.post({"prompt": ["a", "b"], "max_tokens": 1})[0] == 429
        status, found = running.post({"prompt": ["a", "b", "c"], "max_tokens": 1})  # nor later
        assert status == 400 and found["error"]["param"] == "prompt"
        for connection in held:
            connection.close()
        wait_for(lambda: not running.engine.has_work)
        assert running.post({"prompt": "a", "max_tokens": 1})[0] == 200


def test_priorities_in_a_full_queue() -> None:
    engine = Parrot(delay=0.005, max_sequences=1, policy="priority")
    with server(engine, max_requests=5) as running:
        held = []
        for number, priority in enumerate((3, 2, None, -1, 2)):
            connection = running.connect()
            held.append(connection)
            body = {"prompt": "a", "max_tokens": 900 if number == 0 else 3, "priority": priority}
            connection.request("POST", "/v1/completions", json.dumps(body))
            wait_for(lambda wanted=number: len(engine.scheduler.waiting) == wanted and engine.has_work)
        waiting = list(engine.scheduler.waiting)
        assert [each.params.priority for each in waiting] == [-1, 0, 2, 2]
        assert waiting[2].id < waiting[3].id
        assert running.post({"prompt": "a", "priority": -5})[0] == 429
        held[0].close()
        for connection in held[1:]:
            answer = json.loads(connection.getresponse().read())
            assert answer["choices"][0]["text"] == reply(3)
        assert running.post({"prompt": "a", "max_tokens": 3, "priority": -(2**31)})[0] == 200
        for wrong in ("high", 0.5, 2**31, 10**30, [1], {}):
            status, found = running.post({"prompt": "a", "priority": wrong})
            assert status == 400 and found["error"]["param"] == "priority", wrong


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
        assert status == 200 and 'deepspeed_requests_total{model_name="parrot",reason="cancelled"} 1' in text


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


def test_an_answer_whose_logits_are_not_finite_is_an_error_of_the_server() -> None:
    with server(Parrot(cuts={ord("b"): "failed", ord("<"): "failed"})) as running:
        for path, body in (
            ("/v1/completions", {"prompt": "b"}),
            ("/v1/responses", {"model": "parrot", "input": "b"}),
        ):
            status, found = running.post(body, path)
            assert status == 500 and "not finite" in found["error"]["message"], found
        assert running.post({"prompt": "a"}, "/v1/completions")[0] == 200
