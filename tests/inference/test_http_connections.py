"""Connections of the HTTP server: who is let in, how long they may take, and how they and the server end."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
import time
from typing import Any

import pytest

from tests.inference.standin import Bytes, Parrot
from tests.inference.test_service import wait_for

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from deepspeed.inference.serving import listening
from deepspeed.inference.serving.app import ServerSettings
from deepspeed.inference.serving.listening import LoadingAnswers
from tests.inference.test_http import Running, events, reply, server

BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def raw(running: Running) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", running.port))
    made.settimeout(10)
    return made


def asked(body: Any) -> bytes:
    content = json.dumps(body).encode()
    return BEGUN + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def heard(connection: socket.socket, end: bytes) -> bytes:
    """Read until ``end``."""
    found = b""
    while end not in found:
        part = connection.recv(65536)
        assert part, found
        found += part
    return found


def counts(running: Running) -> dict[str, int]:
    """Return the number of ended requests by reason."""
    lines = [line for line in running.call("GET", "/metrics")[1].splitlines() if "requests_total{" in line]
    return {line.split('"')[3]: int(line.split()[-1]) for line in lines}


def test_without_a_token_only_names_of_this_machine_are_answered() -> None:
    with server() as running:
        for host in ("evil.example", "evil.example:80", "[", "", "10.0.0.1"):
            status, found = running.call("GET", "/v1/models", Host=host)
            assert status == 403 and "Host header" in found["error"]["message"], host
            assert running.post({"prompt": "a", "max_tokens": 1}, Host=host)[0] == 403
        for host in ("localhost", f"localhost:{running.port}", "127.0.0.1:80", "[::1]:80"):
            assert running.call("GET", "/health", Host=host)[0] == 200, host
    with server(token="secret") as running:
        assert running.call("GET", "/v1/models", Host="evil.example")[0] == 401
        assert running.call("GET", "/v1/models", Host="a.example", Authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize("token", ["", "sécret", "two words", "line\n"])
def test_a_token_that_no_header_can_hold_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="token: the token (is empty|contains a space or)"):
        ServerSettings(token=token)


def test_headers_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of all headers: what comes now and then does not put it off. Bodies have their own."""
    monkeypatch.setattr(listening, "HEADERS_S", 0.3)
    with server() as running:
        with raw(running) as silent:
            assert silent.recv(100) == b""
        with raw(running) as slow:
            began = time.monotonic()
            slow.sendall(BEGUN)
            time.sleep(0.15)
            slow.sendall(b"X: 1\r\n")
            answer = heard(slow, b"}}")
            assert answer.startswith(b"HTTP/1.1 408") and b'"the headers did not arrive' in answer
            assert time.monotonic() - began < 5
        with raw(running) as second:
            second.sendall(asked({"prompt": "a", "max_tokens": 1}))
            assert heard(second, b"}}").startswith(b"HTTP/1.1 200")
            second.sendall(BEGUN)
            assert heard(second, b"}}").startswith(b"HTTP/1.1 408")
        with raw(running) as patient:
            whole = asked({"prompt": "a", "max_tokens": 1})
            patient.sendall(whole[:-3])
            time.sleep(0.5)
            patient.sendall(whole[-3:])
            assert heard(patient, b"}}").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_early_leaves_no_traceback(
    stream: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with server(Parrot(delay=0.005)) as running:
        connection = raw(running)
        connection.sendall(asked({"prompt": "a", "n": 2, "max_tokens": 1000, "stream": stream}))
        wait_for(lambda: running.engine.has_work)
        connection.close()
        wait_for(lambda: not running.engine.has_work)
        assert counts(running) == {"cancelled": 2}
    gc.collect()
    assert caplog.records == [] and "Traceback" not in "".join(capfd.readouterr())


def test_the_end_of_a_drain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unfinished answers then end with errors; a client that keeps its connection open is disconnected."""
    monkeypatch.setattr(listening, "_LAST_WORDS_S", 0.2)
    with server(Parrot(delay=0.01), drain_seconds=0.2) as running:
        body = {"prompt": "a", "max_tokens": 1000}
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(running.post(body)))
        waiting.start()
        stream, mute = raw(running), raw(running)
        stream.sendall(asked({**body, "stream": True}))
        mute.sendall(asked(body)[:-3])
        cut = raw(running)
        cut.sendall(asked(body))
        wait_for(lambda: running.service.state()["requests"] == 3)
        running.stop()
        waiting.join(10)
        assert b"\r\nretry-after: 5\r\n" in heard(cut, b"}}")
        ((status, answer),) = found
        assert status == 503 and answer["error"]["type"] == "server_error"
        assert "shutting down" in answer["error"]["message"]
        text = b""
        while part := stream.recv(65536):
            text += part
        last = text.decode().split("data: ")[-1].split("\n\n")[0]
        assert json.loads(last) == answer and b"[DONE]" not in text
        running.thread.join(10)
        assert not running.thread.is_alive()
        assert not running.engine.has_work
        for each in (stream, mute):
            each.close()
    gc.collect()
    assert caplog.records == [] and "Traceback" not in "".join(capfd.readouterr())


def test_a_server_without_open_requests_ends_at_once() -> None:
    """Connections that wait, or have not said yet what they want, keep it no time."""
    with server() as running, raw(running) as used, raw(running), raw(running) as begun:
        used.sendall(asked({"prompt": "a", "max_tokens": 1}))
        assert heard(used, b"}}").startswith(b"HTTP/1.1 200")
        begun.sendall(BEGUN)
        began = time.monotonic()
        running.stop()
        running.thread.join(10)
        assert time.monotonic() - began < 2


def test_a_server_is_alive_but_not_ready_while_its_model_is_loaded() -> None:
    """On the sockets that it uses later, so that no connection is ever refused."""
    LoadingAnswers("127.0.0.1", 0).close()
    loading = LoadingAnswers("127.0.0.1", 0)
    try:
        port = loading._server.sockets[0].getsockname()[1]
        running = Running.__new__(Running)
        running.port = port
        assert running.call("GET", "/health") == (200, {"status": "loading"})
        for method, path in (
            ("GET", "/ready?from=probe"),
            ("POST", "/v1/completions"),
            ("DELETE", "/health/x"),
        ):
            status, found = running.call(method, path, b"x" * 10_000)
            assert status == 503 and "being loaded" in found["error"]["message"]
        with raw(running) as asking:
            asking.sendall(b"GET /ready HTTP/1.1\r\n\r\n")
            retry = heard(asking, b"}}")
        with raw(running) as mute, raw(running) as broken:
            mute.sendall(BEGUN)
            broken.sendall(b"\r\n\r\n")
            assert broken.recv(1) == b""
            (held,) = loading.hand_over()
            assert mute.recv(1) == b""  # it is not left waiting
        early = raw(running)
        assert b"Retry-After: 5" in retry
    finally:
        loading.close()
    with server(sockets=[held]) as going_on, early:
        assert going_on.port == port
        early.sendall(asked({"prompt": "a", "max_tokens": 1}))
        assert heard(early, b"}}").startswith(b"HTTP/1.1 200")
        assert going_on.call("GET", "/ready") == (200, {"status": "ok"})


def test_a_server_is_handed_over_when_its_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a clock, and whoever was accepted has an answer."""
    monkeypatch.setattr(listening, "_POLL_S", 60.0)
    for clients in range(3):
        loading = LoadingAnswers("127.0.0.1", 0)
        running = Running.__new__(Running)
        running.port = loading._server.sockets[0].getsockname()[1]
        asking = [raw(running) for _ in range(clients)]
        for each in asking:
            each.sendall(b"GET /ready HTTP/1.1\r\n\r\n")
            each.shutdown(socket.SHUT_WR)
        if clients:  # as connections are accepted in their order
            assert running.call("GET", "/health")[0] == 200
        began = time.monotonic()
        for each in loading.hand_over():
            each.close()
        assert time.monotonic() - began < 30
        for each in asking:
            with each:
                assert heard(each, b"}}").startswith(b"HTTP/1.1 503")


def test_a_server_is_alive_but_not_ready_while_it_drains() -> None:
    """New connections are accepted until the last answer is finished, and new requests told 503."""
    with server(Parrot(delay=0.01)) as running, raw(running) as open_one, raw(running) as late:
        late.sendall(asked({"prompt": "a", "max_tokens": 1})[:-3])  # has asked: it is answered too
        wait_for(lambda: bool(running.listener.server_state.tasks))
        assert running.call("GET", "/ready")[0] == 200
        open_one.sendall(asked({"prompt": "a", "max_tokens": 60}))
        wait_for(lambda: running.engine.has_work)
        running.stop()
        wait_for(lambda: not running.service.healthy)
        assert running.call("GET", "/ready") == (503, {"status": "unavailable"})
        assert running.call("GET", "/health") == (200, {"status": "ok"})
        connection = running.connect()
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score"):
            connection.request("POST", path, b"{}")
            answer = connection.getresponse()
            assert answer.status == 503 and answer.headers["Retry-After"] == "5"
            assert "shutting down" in json.loads(answer.read())["error"]["message"]
        connection.close()
        assert heard(open_one, b"}}").startswith(b"HTTP/1.1 200")
        late.sendall(asked({"prompt": "a", "max_tokens": 1})[-3:])
        assert heard(late, b"}}").startswith(b"HTTP/1.1 200")
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_a_server_whose_generator_failed_is_neither() -> None:
    with server(Parrot(fails_at=1)) as running:
        assert running.post({"prompt": "a"})[0] == 503
        for path in ("/health", "/ready"):
            assert running.call("GET", path) == (
                503,
                {"status": "unavailable", "error": "the device is gone"},
            )


def test_the_address_is_told_once_connections_are_accepted() -> None:
    told: list[tuple[str, int]] = []

    def ready(address: str) -> None:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as made:
            told.append((address, made.getpeername()[1]))

    with server(ready=ready) as running:
        assert told == [(f"http://127.0.0.1:{running.port}", running.port)]


def test_requests_that_a_stop_text_ended_are_counted_so() -> None:
    """Also where the generator was ahead, and had ended the request for another reason."""
    with server() as running:
        for new in (7, 8, 50):
            for stream in (True, False):
                body = {"prompt": "a", "n": 2, "max_tokens": new, "stop": "ß", "stream": stream}
                assert running.post(body)[0] == 200
        assert running.post({"prompt": "a", "max_tokens": 3})[0] == 200
        assert counts(running) == {"stop": 12, "length": 1}


def test_requests_that_are_never_served_are_not_put_off() -> None:
    """Too many for the server at any time: 400. Too many for now: 429, and none of them is begun or counted."""
    with server(Parrot(delay=0.005), max_requests=2) as running:
        chat = {"messages": [{"role": "user", "content": "a"}], "n": 3}
        for path, body, field in (
            ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, "n"),
            ("/v1/completions", {"prompt": ["a", "b", "c"]}, "prompt"),
            ("/v1/chat/completions", chat, "n"),
        ):
            status, found = running.post(body, path)
            assert (
                status == 400
                and found["error"]["param"] == field
                and "at most 2" in found["error"]["message"]
            )
        with raw(running) as held:
            held.sendall(asked({"prompt": "a", "max_tokens": 1000}))
            wait_for(lambda: running.engine.has_work)
            assert running.post({"prompt": "a", "n": 2})[0] == 429
        wait_for(lambda: not running.engine.has_work)
        assert counts(running) == {"cancelled": 1}


def test_ends_of_lines_in_a_text_end_no_event() -> None:
    class Lines(Bytes):
        def decode(self, tokens: list[int]) -> str:
            return super().decode(tokens).replace(",", "\u2028").replace("!", "\u2029").replace("G", "\u0085")

    with server(tokenizer=Lines()) as running:
        _, text = running.post({"prompt": "a", "max_tokens": 60, "stream": True})
        assert all(line.startswith("data: ") for line in text.splitlines() if line)
        said = "".join(part["choices"][0]["text"] for part in events(text))
        assert said == Lines().decode(reply(60).encode().replace(b"\xef\xbf\xbd", b"")) and "\u2028" in said


def test_no_client_is_left_waiting_when_the_model_is_there() -> None:
    """One whose connection had been accepted, but was not answered yet, was never told anything."""
    for round in range(8):
        loading, found = LoadingAnswers("127.0.0.1", 0), []
        port = loading._server.sockets[0].getsockname()[1]

        def ask(port: int = port, found: list[Any] = found) -> None:
            while True:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                try:
                    connection.request("GET", "/ready")
                    found.append(connection.getresponse().status)
                except (OSError, http.client.HTTPException) as error:
                    found.append(type(error))
                    return
                finally:
                    connection.close()

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        time.sleep(0.02 + 0.003 * round)
        for each in loading.hand_over():
            each.close()
        for client in clients:
            client.join(30)
        assert TimeoutError not in found
