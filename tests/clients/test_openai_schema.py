"""Answers and events have the types of OpenAI's own package, checked strictly."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the clients extra is not installed")

from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

from tests.inference.standin import Bytes  # noqa: E402
from tests.inference.test_http import events, server  # noqa: E402
from tests.inference.test_responses import events_of  # noqa: E402

CHAT, MESSAGES = "/v1/chat/completions", [{"role": "user", "content": "Hi"}]
EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}


class Thinking(Bytes):
    """Its template tells how long to reason."""

    template = "<role>content{{ reasoning_effort }}<think></think>"

    def chat(self, messages: Any, arguments: Any = ()) -> list[int]:
        return super().chat(messages) + self.encode(dict(arguments).get("reasoning_effort") or "")


def check(kind: Any, value: Any) -> None:
    kind.model_validate_json(json.dumps(value), strict=True)


def test_chats() -> None:
    with server() as running:
        body = {"messages": MESSAGES, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 2}
        check(ChatCompletion, running.post(body, CHAT)[1])
        for more, counts in (({}, False), ({"continuous_usage_stats": True}, True)):
            options = {"stream": True, "stream_options": {"include_usage": True, **more}}
            *parts, last = events(running.post({**body, **options}, CHAT)[1])
            for part in (*parts, last):
                check(ChatCompletionChunk, part)
            assert last["usage"]["completion_tokens"] == 10 and not last["choices"]
            told = [part["usage"] and part["usage"]["completion_tokens"] for part in parts]
            assert (told == sorted(told) and told[-1] == 10) if counts else not any(told)
        alone = events(running.post({**body, "stream": True}, CHAT)[1])
        assert not any("usage" in part for part in alone)


def test_responses() -> None:
    with server() as running:
        body = {"input": "Hi", "max_output_tokens": 5}
        check(Response, running.post(body, "/v1/responses")[1])
        for event in events_of(running, **body):
            check(EVENTS[event["type"]], event)


def test_the_effort_of_reasoning_goes_to_the_template() -> None:
    chat, response = {"messages": MESSAGES, "max_tokens": 1}, {"input": "Hi", "max_output_tokens": 16}
    with server(tokenizer=Thinking()) as running:
        for effort in ("low", "none"):
            found = running.post({**chat, "reasoning_effort": effort}, CHAT)[1]
            plain = running.post(chat, CHAT)[1]["usage"]["prompt_tokens"]
            assert found["usage"]["prompt_tokens"] == plain + len(effort)
        status, found = running.post({**response, "reasoning": {"effort": "high"}}, "/v1/responses")
        assert status == 200 and found["reasoning"]["effort"] == "high"
        assert found["usage"]["input_tokens"] == plain + 4
        for reasoning, words in (
            ({"effort": 5}, "reasoning.effort"),
            ({"effort": "x" * 65}, "reasoning.effort"),
            ({"summary": "detailed"}, "reasoning.summary is not supported"),
        ):
            status, found = running.post({**response, "reasoning": reasoning}, "/v1/responses")
            assert status == 400 and words in found["error"]["message"], found
    with server() as running:
        assert running.post({**chat, "reasoning_effort": "none"}, CHAT)[0] == 200
        status, found = running.post({**chat, "reasoning_effort": "low"}, CHAT)
        assert status == 400 and "the chat template has no reasoning_effort" in found["error"]["message"]


def test_a_prompt_without_special_tokens() -> None:
    class Marked(Bytes):
        def encode(self, text: str) -> list[int]:
            return [1, *super().encode(text)]

        def words(self, text: str) -> list[int]:
            return super().encode(text)

    with server(tokenizer=Marked()) as running:
        for more, count in (({}, 3), ({"add_special_tokens": False}, 2)):
            found = running.post({"prompt": "Hi", "max_tokens": 1, **more})[1]
            assert found["usage"]["prompt_tokens"] == count
