"""The page at ``/``: what it may load, and a chat in headless Chromium."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from deepspeed.inference.serving.tokenizers import BEGIN
from tests.inference.standin import Bytes, Parrot
from tests.inference.test_http import reply, server
from tests.inference.test_service import wait_for

DRIVER = shutil.which("chromedriver")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # by the WebDriver standard


def test_it_loads_nothing_and_runs_its_own_script_only() -> None:
    with server(token="secret") as running:
        connection = running.connect()
        connection.request("GET", "/")
        answer = connection.getresponse()
        text, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
        connection.close()
        assert running.call("GET", "/", Host="elsewhere.example")[0] == 200  # the token protects the model
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/html")
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\bsrc=|\bhref=|https?:|url\(|\bon[a-z]+=|innerHTML|eval\(", text)
    assert len(text.splitlines()) <= 200


def test_a_model_without_a_template_completes() -> None:
    class Plain(Bytes):
        template = ""

    for tokenizer, kind in ((Bytes(), "chat"), (Plain(), "language")):
        with server(tokenizer=tokenizer) as running:
            (model,) = running.call("GET", "/v1/models")[1]["data"]
            assert model["type"] == kind
            assert running.call("GET", "/", Host="elsewhere.example")[0] == 403


class Browser:
    """A session of WebDriver."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        options = {"goog:chromeOptions": {"args": FLAGS}}
        made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self.base += f"/session/{made['sessionId']}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, content, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def find(self, selector: str) -> str:
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{found[_ELEMENT]}"

    def write(self, selector: str, text: str) -> None:
        self.call("POST", self.find(selector) + "/value", {"text": text})

    def value(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def wait(self, script: str) -> None:
        for _ in range(600):
            if self.value(script):
                return
            time.sleep(0.1)
        raise AssertionError(f"not in a minute: {script}; {self.value('document.body.innerText')}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert DRIVER is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        made = Browser(port)
        yield made
        made.call("DELETE", "")
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.skipif(DRIVER is None, reason="there is no chromedriver on this machine")
def test_a_chat_in_a_browser() -> None:
    """Streamed, with the token, after a refusal without it; stopped in between."""
    engine = Parrot(delay=0.01)
    with server(engine, token="secret") as running, browser() as page:
        page.call("POST", "/url", {"url": f"http://127.0.0.1:{running.port}/"})
        page.write("#text", "<b>Hi</b>\ue007")  # Enter
        page.wait("document.querySelector('.error')?.textContent.includes('Authorization')")
        assert page.value("document.querySelectorAll('.user.dropped').length") == 1
        page.write("#key", "secret\ue004")  # Tab
        page.wait("document.querySelector('#model').value === 'parrot'")
        page.call("POST", page.find("#clear") + "/click", {})
        page.value("document.querySelector('#most').value = 40")
        page.write("#text", "<b>Hi</b>\ue007")
        page.wait("document.querySelector('#send').textContent === 'send'")
        assert page.value("document.querySelector('.assistant').textContent") == reply(40)
        assert page.value("document.querySelector('.user').textContent") == "<b>Hi</b>"
        assert page.value("document.querySelectorAll('b, .error').length") == 0
        page.value("document.querySelector('#most').value = 900")
        page.write("#text", "More\ue007")
        page.wait("document.querySelectorAll('.assistant')[1].textContent.length > 3")
        page.call("POST", page.find("#send") + "/click", {})
        page.wait("document.querySelector('#send').textContent === 'send'")
        wait_for(lambda: not engine.has_work)  # the client has left


class Listening(Bytes):
    """``heard``: the messages of the latest chat."""

    heard: Sequence[dict[str, Any]] = ()

    def chat(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any] = BEGIN) -> list[int]:
        self.heard = [{"role": each["role"], "content": each["content"]} for each in messages]
        return super().chat(messages, arguments)


@pytest.mark.slow
@pytest.mark.skipif(DRIVER is None, reason="there is no chromedriver on this machine")
def test_the_model_reads_the_conversation_that_is_shown() -> None:
    """With what an answer had when it was stopped; nothing of one before a new chat."""
    engine, tokenizer = Parrot(delay=0.01), Listening()
    with server(engine, tokenizer=tokenizer) as running, browser() as page:
        page.call("POST", "/url", {"url": f"http://127.0.0.1:{running.port}/"})
        page.wait("document.querySelector('#model').value === 'parrot'")

        def begin(text: str) -> None:
            page.write("#text", f"{text}\ue007")  # Enter
            page.wait("[...document.querySelectorAll('.assistant')].at(-1).textContent.length > 3")

        page.value("document.querySelector('#most').value = 400")
        begin("One")
        page.call("POST", page.find("#send") + "/click", {})
        page.wait("document.querySelector('#send').textContent === 'send'")
        part = page.value("document.querySelector('.assistant').textContent")
        assert reply(400).startswith(part) and len(part) < len(reply(400))
        begin("Two")
        first = [{"role": "user", "content": "One"}, {"role": "assistant", "content": part}]
        assert tokenizer.heard == [*first, {"role": "user", "content": "Two"}]
        page.call("POST", page.find("#clear") + "/click", {})
        assert page.value("document.querySelector('#send').textContent") == "send"
        wait_for(lambda: not engine.has_work)  # the answer has no reader
        begin("Three")
        assert tokenizer.heard == [{"role": "user", "content": "Three"}]
        page.call("POST", page.find("#clear") + "/click", {})
        begin("Four")  # while the answer before is being cancelled
        assert tokenizer.heard == [{"role": "user", "content": "Four"}]
        page.wait("document.querySelector('#send').textContent === 'send'")
        assert page.value("document.querySelector('.assistant').textContent") == reply(400)
        assert page.value("document.querySelectorAll('.error, .dropped').length") == 0
