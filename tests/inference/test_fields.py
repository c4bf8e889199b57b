"""Names of fields in requests: those of clients are accepted, those that would be lost are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.bodies import RequestError
from deepspeed.inference.serving.fields import HARMLESS, NEUTRAL
from deepspeed.inference.serving.protocol import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "Hi"}]


def parsed(kind: Any = CompletionRequest, **fields: Any) -> Any:
    given = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "Hi"}
    return protocol.parse(kind, json.dumps({**given, **fields}).encode())


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_unknown_fields_are_named(kind: Any) -> None:
    for name, value, hint in (
        ("temperatur", 0.5, "did you mean 'temperature'?"),
        ("Max_Tokens", 3, "did you mean 'max_tokens'?"),
        ("max_new_tokens", 3, "did you mean 'max_tokens'?"),
        ("n_predict", 3, "did you mean 'max_tokens'?"),
        ("repeat_penalty", 1.1, "did you mean 'repetition_penalty'?"),
        ("stop_sequences", ["a"], "did you mean 'stop'?"),
        ("regex", "a+", ""),
        ("extra_body", {}, ""),
        ("do_sample", False, ""),
        ("prompt" if kind is ChatRequest else "messages", "a", "it belongs to /v1/c"),
    ):
        with pytest.raises(RequestError, match=f"unknown field '{name}'") as found:
            parsed(kind, **{name: value})
        assert found.value.field == name and hint in str(found.value)
        assert bool(hint) == (": " in str(found.value)), found.value
        assert parsed(kind, **{name: None})
    with pytest.raises(RequestError, match="did you mean 'include_usage'") as found:
        parsed(kind, stream=True, stream_options={"include_usages": True})
    assert found.value.field == "stream_options.include_usages"


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_what_changes_nothing_is_accepted(kind: Any) -> None:
    own = kind.model_fields
    plain = parsed(kind)
    for name in HARMLESS:
        assert parsed(kind, **{name: {"any": 1}}) == plain
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            assert parsed(kind, **{name: value}) == plain
        if name not in own:
            with pytest.raises(RequestError, match=f"{name} is not supported") as found:
                parsed(kind, **{name: {"any": 1}})
            assert found.value.field == name
    assert not HARMLESS & set(NEUTRAL)
    for fields in ({"top_k": -1}, {"logprobs": False}, {"stream_options": {}}, {"best_of": 1}, {"stop": []}):
        request = parsed(kind, **fields)
        assert request.top_k == 0 and not protocol.wants_logprobs(request)
    special = {"add_special_tokens": kind is CompletionRequest}
    assert parsed(kind, **special) == plain
    if kind is CompletionRequest:
        assert not parsed(kind, add_special_tokens=False).add_special_tokens
        return
    with pytest.raises(RequestError, match="add_special_tokens"):
        parsed(kind, add_special_tokens=True)


def test_zero_asks_for_logprobs_of_completions() -> None:
    assert protocol.wants_logprobs(parsed(logprobs=0)) and protocol.wants_logprobs(parsed(logprobs=1))
    assert protocol.wants_logprobs(parsed(ChatRequest, logprobs=True))


CLIENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "openai": (
        ChatRequest,
        {
            "model": "a",
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "response_format": {"type": "text"},
            "tools": None,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "store": False,
            "metadata": {"job": "1"},
            "service_tier": "auto",
            "modalities": ["text"],
            "prompt_cache_key": "a",
            "safety_identifier": "b",
            "verbosity": "medium",
        },
    ),
    "langchain": (
        CompletionRequest,
        {
            "model": "a",
            "temperature": 0.7,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "n": 1,
            "best_of": 1,
            "logit_bias": {},
            "logprobs": None,
            "seed": None,
            "max_tokens": 256,
        },
    ),
    "litellm": (
        ChatRequest,
        {
            "model": "a",
            "logprobs": False,
            "top_logprobs": None,
            "functions": [],
            "function_call": None,
            "user": "",
            "seed": 1,
            "logit_bias": None,
            "max_completion_tokens": 5,
            "reasoning_effort": None,
        },
    ),
    "lm-eval, likelihoods": (
        CompletionRequest,
        {
            "prompt": [[1, 2], [3]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ),
    "lm-eval, chats": (
        ChatRequest,
        {"max_tokens": 5, "temperature": 0, "stop": ["a", "b"], "seed": 1234},
    ),
    "vLLM's benchmark": (
        CompletionRequest,
        {
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 5,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "top_k": -1,
            "min_p": 0.0,
            "skip_special_tokens": True,
            "add_special_tokens": True,
        },
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send(client: str) -> None:
    kind, fields = CLIENTS[client]
    request = parsed(kind, **fields)
    for name in set(fields) & set(kind.model_fields):
        assert getattr(request, name) == fields[name] or not fields[name] or fields[name] == -1
