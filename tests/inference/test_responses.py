"""Responses over HTTP: items, named events, conversations that are remembered, and what bounds them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepspeed.inference.serving.bodies import RequestError
from deepspeed.inference.serving.responses import ResponseStore, messages_of_items

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from tests.inference.test_http import Running
from tests.inference.test_tool_calls import WEATHER, Template, says
from tests.inference.test_tool_formats import HERMES, PARIS

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}


def events_of(running: Running, **body: Any) -> list[dict[str, Any]]:
    status, text = running.post({"stream": True, **body}, PATH)
    assert status == 200
    made = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    assert [each["sequence_number"] for each in made] == list(range(len(made)))
    return made


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        left_out = ("id", "call_id", "created_at")
        return {name: without_ids(each) for name, each in value.items() if name not in left_out}
    return value


def test_text_whole_and_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template()
    with says(monkeypatch, "Hello, you.", template=template) as running:
        body = {"input": "Hi", "instructions": "Be brief.", "temperature": 0, "metadata": {"a": "b"}}
        status, found = running.post(body, PATH)
        assert status == 200 and found["object"] == "response" and found["status"] == "completed"
        (item,) = found["output"]
        part = {"type": "output_text", "text": "Hello, you.", "annotations": [], "logprobs": []}
        assert item["type"] == "message" and item["role"] == "assistant" and item["content"] == [part]
        assert found["usage"]["total_tokens"] == 6 + 12 and found["metadata"] == {"a": "b"}
        told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        assert template.seen[0][0] == told
        events = events_of(running, **body)
        names = [each["type"].removeprefix("response.") for each in events]
        first = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
        last = ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert names[:5] == first and names[-4:] == last
        assert set(names[4:-4]) == {"output_text.delta"}
        assert "".join(each["delta"] for each in events if "delta" in each) == "Hello, you."
        assert without_ids(events[-1]["response"]) == without_ids(found)
        cut = running.post({**body, "max_output_tokens": 5}, PATH)[1]
        assert cut["status"] == "incomplete" and cut["output"][0]["content"][0]["text"] == "Hello"
        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_reasoning_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template()
    said = f"<think>Hm.</think>Let me see. {HERMES}{HERMES}"
    with says(monkeypatch, said, reasoning="qwen3", template=template) as running:
        body = {"input": "Weather?", "tools": [TOOL]}
        status, found = running.post(body, PATH)
        assert status == 200, found
        kinds = [each["type"] for each in found["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert found["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert found["output"][2]["name"] == "weather" and found["output"][2]["arguments"] == PARIS
        assert found["usage"]["output_tokens_details"]["reasoning_tokens"] >= 3
        assert template.seen[0][1]["tools"] == [WEATHER]
        events = events_of(running, **body)
        assert without_ids(events[-1]["response"]) == without_ids(found)
        done = [each for each in events if each["type"] == "response.function_call_arguments.done"]
        assert [each["arguments"] for each in done] == [PARIS, PARIS]
        call = found["output"][2]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        running.post({"input": [output], "previous_response_id": found["id"], "tools": [TOOL]}, PATH)
        question, answer, result = template.seen[-1][0]
        assert question == {"role": "user", "content": "Weather?"}
        assert answer["content"] == "Let me see." and answer["reasoning_content"] == "Hm."
        functions = [each["function"] for each in answer["tool_calls"]]
        assert functions == [{"name": "weather", "arguments": json.loads(PARIS)}] * 2
        assert result == {"role": "tool", "tool_call_id": call["call_id"], "content": "sunny"}


def test_conversations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template()
    with says(monkeypatch, "Yes.", template=template) as running:
        first = running.post({"input": "One", "instructions": "Once."}, PATH)[1]
        second = running.post({"input": "Two", "previous_response_id": first["id"]}, PATH)[1]
        told = [each["content"] for each in template.seen[-1][0]]
        assert told == ["One", "Yes.", "Two"]  # instructions hold for one response
        assert running.call("GET", f"{PATH}/{second['id']}") == (200, second)
        status, deleted = running.call("DELETE", f"{PATH}/{first['id']}")
        assert status == 200 and deleted == {"id": first["id"], "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            assert running.call(method, f"{PATH}/{first['id']}")[0] == 404
        unkept = running.post({"input": "One", "store": False}, PATH)[1]
        for id in (first["id"], unkept["id"]):
            status, found = running.post({"input": "Two", "previous_response_id": id}, PATH)
            assert status == 400 and found["error"]["param"] == "previous_response_id"
        # What follows a forgotten response still knows it.
        running.post({"input": "Three", "previous_response_id": second["id"]}, PATH)
        assert [each["content"] for each in template.seen[-1][0]] == ["One", "Yes.", "Two", "Yes.", "Three"]


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type"),
        ({"input": [{"content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "rm"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "response_format.type"),
        ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"messages": []}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with says(monkeypatch, "Yes.") as running:
        status, found = running.post({"input": "Hi", **fields}, PATH)
        assert status == 400 and found["error"]["param"] == field, found


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        call,
        call,
    ]
    system, user, answer = messages_of_items(items)
    assert system["role"] == "system" and user["content"] == "ab"
    assert answer["reasoning"] == "Hm." and len(answer["tool_calls"]) == 2
    with pytest.raises(RequestError):
        messages_of_items([{"type": "reasoning", "content": "a"}])


def test_the_store_is_bounded() -> None:
    now = [0.0]
    store = ResponseStore(count=3, seconds=10, size=400, clock=lambda: now[0])

    def put(id: str, length: int = 1) -> None:
        store.put({"id": id}, [{"content": "a" * length}])

    def known(ids: str) -> str:
        return "".join(id for id in ids if store.get(id) is not None)

    for id in "abcd":
        put(id)
    assert known("abcd") == "bcd"
    put("e", 330)
    assert known("bcde") == "de"
    put("f", 500)  # larger than all may be
    assert known("def") == "de"
    assert store.delete("d") and not store.delete("d")
    now[0] = 5.0
    put("g")
    now[0] = 10.0
    assert known("eg") == "g"
    now[0] = 15.0
    assert known("g") == "" and store._size == 0


def test_the_client_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    with says(monkeypatch, f"<think>Hm.</think>Yes. {HERMES}", reasoning="qwen3") as running:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        with client.responses.stream(model="parrot", input="Hi", tools=[TOOL]) as stream:
            names = {event.type for event in stream}
            found = stream.get_final_response()
        assert {"response.created", "response.output_text.delta", "response.completed"} <= names
        assert found.output_text == "Yes." and found.output[-1].arguments == PARIS
        assert client.responses.retrieve(found.id).output_text == "Yes."
        client.responses.delete(found.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(found.id)
        chat = {"model": "parrot", "messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
        (choice,) = client.chat.completions.create(**chat).choices
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather" and call.function.arguments == PARIS
        with client.chat.completions.stream(**chat) as stream:
            for _ in stream:
                pass
            (streamed,) = stream.get_final_completion().choices
        assert streamed.message.tool_calls[0].function.arguments == PARIS
        assert streamed.finish_reason == choice.finish_reason == "tool_calls"
