"""Routes that turn texts into tokens and back, and what the server says of itself."""

from __future__ import annotations

import time

import pytest

from tests.inference.standin import Bytes
from tests.inference.test_bodies import HOSTILE

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

import deepspeed
from tests.inference.test_http import server

TEXT = "Grüße 🙂"


class WithBeginning(Bytes):
    """Special tokens: 1 at the beginning of a text."""

    def encode(self, text: str) -> list[int]:
        return [1, *super().encode(text)]

    words = Bytes.encode


def test_texts_to_tokens_and_back() -> None:
    with server(tokenizer=WithBeginning(), max_length=100) as running:
        tokens = list(TEXT.encode())
        status, found = running.post({"prompt": TEXT, "model": "parrot"}, "/tokenize")
        assert status == 200
        assert found == {
            "count": len(tokens) + 1,
            "max_model_len": 100,
            "tokens": [1, *tokens],
            "token_strs": None,
        }
        body = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
        found = running.post(body, "/tokenize")[1]
        assert found["tokens"] == [97, 98] and found["token_strs"] == ["<97>", "<98>"]
        assert running.post({"prompt": ""}, "/tokenize")[1]["tokens"] == [1]
        assert running.post({"tokens": tokens}, "/detokenize") == (200, {"prompt": TEXT})
        assert running.post({"tokens": []}, "/detokenize") == (200, {"prompt": ""})
        messages = [{"role": "user", "content": "a"}]
        status, found = running.post({"messages": messages, "add_generation_prompt": False}, "/tokenize")
        assert status == 200 and found["tokens"] == list(b"\x01<user>a")


def test_what_is_refused() -> None:
    with server() as running:
        for path, body, words in (
            ("/tokenize", {}, "either prompt or messages"),
            ("/tokenize", {"prompt": "a", "messages": []}, "either prompt or messages"),
            ("/tokenize", {"prompt": [1]}, "prompt: expected a string, not a list"),
            ("/tokenize", {"messages": [1]}, "messages.0: expected an object"),
            ("/tokenize", {"prompt": "a", "temperature": 1}, "unknown field 'temperature'"),
            ("/detokenize", {}, "tokens: Field required"),
            ("/detokenize", {"tokens": "ab"}, "tokens: expected a list, not a string"),
            ("/detokenize", {"tokens": [1, True]}, "tokens.1: expected an integer"),
            ("/detokenize", {"tokens": [-1]}, "tokens.0: -1 is not a token"),
            ("/detokenize", {"tokens": [2**40]}, "is not a token"),
        ):
            status, found = running.post(body, path)
            assert status == 400 and words in found["error"]["message"], (body, found)
        assert running.call("GET", "/tokenize")[0] == 405
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert running.post({**body, "model": "other"}, path)[0] == 404
        began = time.monotonic()
        for place, body in enumerate(HOSTILE.values()):
            status, found = running.post(body, ("/tokenize", "/detokenize")[place % 2])
            assert status == 400 and len(found["error"]["message"]) < 200
        assert time.monotonic() - began < 20
        assert running.call("GET", "/health")[0] == 200


def test_what_the_server_says_of_itself() -> None:
    with server(token="secret", max_length=77) as running:
        assert running.call("GET", "/version") == (200, {"version": deepspeed.__version__})
        assert running.call("GET", "/tokenizer_info")[0] == 401
        assert running.post({"prompt": "a"}, "/tokenize")[0] == 401
        known = {"Authorization": "Bearer secret"}
        assert running.call("GET", "/tokenizer_info", **known)[1]["tokenizer_class"] == "Bytes"
        listed = running.call("GET", "/v1/models", **known)[1]["data"]
        assert [each["max_model_len"] for each in listed] == [77]
        assert listed[0]["id"] == listed[0]["root"] == "parrot"
        assert running.call("GET", "/v1/models/parrot", **known)[1] == listed[0]
