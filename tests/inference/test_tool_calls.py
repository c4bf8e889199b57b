"""Tools and reasoning over HTTP, with a scripted generator."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.inference import standin
from tests.inference.standin import BEGIN, Bytes

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from deepspeed.inference.serving.tool_requests import Formats
from tests.inference.test_http import Running, events, server
from tests.inference.test_tool_formats import HERMES, PARIS, XML

CHATS = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER, NOW]}


class Template(Bytes):
    """``end``: of every prompt. Bytes 1, and more where ``specials`` says so, are special tokens."""

    def __init__(self, end: str = "", specials: Mapping[int, str] | None = None) -> None:
        self.end = end
        self.specials = dict(specials or {1: "[TOOL_CALLS]"})
        self.seen: list[tuple[Any, dict[str, Any]]] = []

    def decode(self, tokens: list[int]) -> str:
        return super().decode([token for token in tokens if token not in self.specials])

    def chat(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any] = BEGIN) -> list[int]:
        self.seen.append((messages, dict(arguments)))
        return self.encode(f"<user>{self.end}")


@contextlib.contextmanager
def says(
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    tools: str | None = "hermes",
    reasoning: str | None = None,
    *,
    template: Template | None = None,
    **more: Any,
) -> Iterator[Running]:
    """A server whose model always says ``text``, and then ends."""
    monkeypatch.setattr(standin, "REPLY", f"{text}\0")
    made = template or Template()
    with server(tokenizer=made, formats=Formats(tools, reasoning), **more) as running:
        yield running


def both(running: Running, **fields: Any) -> dict[str, Any]:
    """Return the choice of an answer, whose stream has the same parts, each call by its name first."""
    status, found = running.post({**ASKED, **fields}, CHATS)
    assert status == 200, found
    (choice,) = found["choices"]
    status, text = running.post({**ASKED, **fields, "stream": True}, CHATS)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for event in events(text):
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function" and call["function"]["name"]
                calls.append({"id": call["id"], "type": "function", "function": call["function"]})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert events(text)[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    told = [{**each, "id": ""} for each in choice["message"].pop("tool_calls", [])]
    assert [{**each, "id": ""} for each in calls] == told
    assert {**message, "content": message["content"] or None} == {
        **choice["message"],
        "content": choice["message"]["content"] or None,
    }
    return {"calls": [each["function"] for each in told], **choice}


@pytest.mark.parametrize("name, text", [("hermes", HERMES), ("qwen3_coder", XML)])
def test_calls_whole_and_streamed(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with says(monkeypatch, f"Let me see.\n{text}", name) as running:
        found = both(running)
        assert found["message"] == {"role": "assistant", "content": "Let me see."}
        assert found["calls"] == [{"name": "weather", "arguments": PARIS}]
        assert found["finish_reason"] == "tool_calls"
        cut = both(running, max_tokens=len("Let me see.\n" + text) - 20 - 10 * (name != "hermes"))
        assert cut["finish_reason"] == "length" and cut["calls"][0]["name"] == "weather"
        stopped = both(running, stop="Paris")
        assert stopped["finish_reason"] == "stop"
        assert not stopped["calls"] or not stopped["calls"][0]["arguments"].endswith("}")
        ignored = both(running, tool_choice="none")
        assert ignored["message"]["content"] == f"Let me see.\n{text}" and ignored["finish_reason"] == "stop"
        assert both(running, tools=[NOW])["message"]["content"] == f"Let me see.\n{text}"


def test_several_calls_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with says(monkeypatch, f"{HERMES}\n{HERMES} and more") as running:
        several = both(running)
        assert len(several["calls"]) == 2 and several["message"]["content"] == "and more"
        for field in ({"parallel_tool_calls": False}, {"tool_choice": WEATHER}):
            one = both(running, **field)
            assert len(one["calls"]) == 1 and one["message"]["content"] is None
            assert one["finish_reason"] == "tool_calls"
        _, found = running.post({**ASKED, "parallel_tool_calls": False}, CHATS)
        assert found["usage"]["completion_tokens"] < len(HERMES) + 1
        assert [found["choices"][0]["message"]["content"], found["choices"][0]["message"]["role"]] == [
            None,
            "assistant",
        ]


def test_a_marker_that_is_a_special_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with says(monkeypatch, f'Hm. \1[{{"name": "weather", "arguments": {PARIS}}}]', "mistral") as running:
        assert both(running)["calls"] == [{"name": "weather", "arguments": PARIS}]
        hidden = both(running, tools=[])
        assert hidden["message"]["content"].startswith("Hm. [{")
        shown = both(running, tools=[], skip_special_tokens=False)
        assert shown["message"]["content"].startswith("Hm. [TOOL_CALLS][{")
        body = {"prompt": "a", "max_tokens": 6, "skip_special_tokens": False}
        assert running.post(body)[1]["choices"][0]["text"] == "Hm. [TOOL_CALLS]["


@pytest.mark.parametrize("name, text", [("hermes", HERMES), ("qwen3_coder", XML)])
def test_tags_of_calls_that_are_special_tokens(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template(specials={1: "<tool_call>", 2: "</tool_call>"})
    inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    with says(monkeypatch, f"Hm. \1{inner}\2", name, template=template) as running:
        for choice in ("auto", "required"):
            found = both(running, tool_choice=choice)
            assert found["calls"] == [{"name": "weather", "arguments": PARIS}]
            assert found["message"]["content"] == "Hm." and found["finish_reason"] == "tool_calls"


def test_reasoning_with_and_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"So < that.\n</think>\n\nYes. {HERMES}"
    for end, text in (("<think>\n", said), ("", f"<think>{said}")):
        with says(monkeypatch, text, reasoning="qwen3", template=Template(end)) as running:
            found = both(running)
            assert found["message"]["reasoning_content"] == found["message"]["reasoning"] == "So < that."
            assert found["message"]["content"] == "Yes." and len(found["calls"]) == 1
            found = both(running, tools=None)
            assert (
                found["message"]["reasoning"] == "So < that."
                and found["message"]["content"] == f"Yes. {HERMES}"
            )
    with says(monkeypatch, said, reasoning="deepseek_r1", template=Template("<think></think>\n")) as running:
        assert both(running, tools=None)["message"] == {"role": "assistant", "content": said}


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(
    "begun, is_inside",
    [
        ("<think>\nHm.\n</think>The answer is", False),
        ("The answer is", False),
        ("<think>\nfoo", True),
        ("<think>a</think> b <think> " + "c" * 100, True),
    ],
)
def test_a_message_that_goes_on(
    name: str, begun: str, is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message tells whether it ends amid reasoning, the end of the prompt does not."""
    messages = [*ASKED["messages"], {"role": "assistant", "content": begun}]
    with says(monkeypatch, " 42. </think> So.", reasoning=name, template=Template(begun)) as running:
        for field in (
            {"continue_final_message": True},
            {"add_generation_prompt": False, "chat_template_kwargs": {"continue_final_message": True}},
        ):
            told = both(running, messages=messages, tools=None, **field)["message"]
            assert told.get("reasoning") == ("42." if is_inside else None)
            assert told["content"] == ("So." if is_inside else " 42. </think> So.")


@pytest.mark.parametrize("end, is_inside", [("<think>\n", True), ("<think>\n\n</think>\n\n", False)])
def test_a_message_that_goes_on_and_is_empty(
    end: str, is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": ""}]
    with says(monkeypatch, "Hm.</think>So.", reasoning="qwen3", template=Template(end)) as running:
        told = both(running, messages=messages, tools=None, continue_final_message=True)["message"]
        assert told["content"] == ("So." if is_inside else "Hm.</think>So.")


def test_what_the_template_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template()
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    broken = {"id": "b", "function": {"name": "now", "arguments": '{"a'}}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    with says(monkeypatch, "It is sunny.", template=template, trust_templates=True) as running:
        assert both(running, messages=history)["message"]["content"] == "It is sunny."
        messages, arguments = template.seen[0]
        assert arguments["tools"] == ASKED["tools"] and arguments["add_generation_prompt"]
        told = messages[1]["tool_calls"]
        assert told[0]["function"] == {"name": "weather", "arguments": json.loads(PARIS)}
        assert told[1]["function"]["arguments"] == '{"a' and messages[1]["reasoning_content"] == "Hm."
        assert messages[1]["content"] == "" and messages[2] == history[2]
        both(running, tool_choice="none", chat_template="{{ messages }}")
        assert "tools" not in template.seen[-1][1]
        assert template.seen[-1][1]["chat_template"] == "{{ messages }}"


LISTS = '{"a": [' + ",".join(["[]"] * 40_000) + "]}"


@pytest.mark.parametrize("path", ["/tokenize", CHATS, "/v1/responses"])
def test_arguments_of_the_history_are_bounded(path: str, shared: Running) -> None:
    """Together, as the parts of a body are; what is malformed stays text, and one call is served."""

    def body(*arguments: str) -> dict[str, Any]:
        calls = [{"function": {"name": "now", "arguments": each}} for each in arguments]
        if path != "/v1/responses":
            return {"messages": [{"role": "assistant", "content": "a", "tool_calls": calls}]}
        items = [{"type": "function_call", "call_id": "a", **each["function"]} for each in calls]
        return {"input": items, "max_output_tokens": 1}

    for arguments in ((LISTS,), (LISTS[:-1],), ('{"a": "\\ud83d"}', "[" * 5000, '{"a": NaN}')):
        status, found = shared.post(body(*arguments), path)
        assert status == 200, found
    gc.collect()  # of what other tests left in this process
    began = time.process_time()
    status, found = shared.post(body("{}", LISTS, LISTS), path)
    assert time.process_time() - began < 1
    assert status == 400 and found["error"]["param"] == "messages.0.tool_calls.2.function.arguments"


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [1]}, "tools.0"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"function": {"name": "a", "parameters": 3}}]}, "tools.0.function.parameters"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "rm"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"parallel_tool_calls": {}}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages.0.tool_calls.0"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs.chat_template"),
    ],
)
def test_what_is_refused(
    fields: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch, shared: Any
) -> None:
    status, found = shared.post({**ASKED, **fields}, CHATS)
    assert status == 400 and found["error"]["param"] == field, found


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(100):
    DEEP = {"anyOf": [DEEP]}


@pytest.mark.parametrize("path", [CHATS, "/v1/responses"])
@pytest.mark.parametrize(
    "schema, place",
    [
        ({"properties": []}, "properties"),
        ({"properties": {"a": 3}}, "properties.a"),
        ({"properties": {"a": {}}, "required": True}, "required"),
        ({"required": ["a", {}]}, "required"),
        ({"type": {}}, "type"),
        ({"properties": {"a": {"type": [{"x": 1}]}}}, "properties.a.type"),
        ({"properties": {"a": {"enum": "b"}}}, "properties.a.enum"),
        ({"properties": {"a": {"anyOf": [{}, {"oneOf": 3}]}}}, "properties.a.anyOf.1.oneOf"),
        ({"properties": {"a": {"items": {"required": True}}}}, "properties.a.items.required"),
        ({"$defs": {"a": {"allOf": [None]}}}, "$defs.a.allOf.0"),
        (DEEP, ".".join(["anyOf.0"] * 65)),
    ],
)
def test_schemas_that_are_none(schema: Any, place: str, path: str, forms: Running) -> None:
    function = {"name": "f", "parameters": schema}
    tool = {"type": "function", "function": function}
    asked = {**ASKED, "tools": [tool]} if path == CHATS else {"input": "a", "tools": [{**tool, **function}]}
    status, found = forms.post({**asked, "tool_choice": "required"}, path)
    assert status == 400 and found["error"]["param"] == f"tools.0.function.parameters.{place}", found


@pytest.fixture(scope="module")
def forms() -> Iterator[Running]:
    with server(tokenizer=Template(), formats=Formats("qwen3_coder")) as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with server(tokenizer=Template(), formats=Formats("hermes")) as running:
        yield running


def test_a_model_whose_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with says(monkeypatch, f'{{"name": "weather", "parameters": {PARIS}}}', None) as running:
        status, found = running.post(ASKED, CHATS)
        assert status == 400 and "--tool-call-parser" in found["error"]["message"]
        assert both(running, tool_choice="required")["calls"] == [{"name": "weather", "arguments": PARIS}]
