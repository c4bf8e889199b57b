"""OpenAI's Responses API: a conversation that the server stores for a while, as items and named events. Pure."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deepspeed.inference.serving.bodies import RequestError, kind_of
from deepspeed.inference.serving.fields import check_names
from deepspeed.inference.serving.pieces import Piece
from deepspeed.inference.serving.protocol import ChatRequest, ResponsesRequest

_TEXTS = ("input_text", "output_text", "text")
_RENAMED = {
    "text", "input", "instructions", "max_output_tokens", "previous_response_id", "tools", "tool_choice",
}  # fmt: skip

_ITEMS = {"text": "message", "reasoning": "reasoning", "arguments": "function_call", "call": ""}
_DELTAS = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "arguments": "response.function_call_arguments.delta",
}
_MORE: dict[str, dict[str, Any]] = {"text": {"logprobs": []}}
"""Fields of the events of a part."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and the messages up to its end, both as JSON. ``until``: expiry, in seconds of `time.monotonic`."""

    response: str
    messages: str
    until: float

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


@dataclass(kw_only=True)
class ResponseStore:
    """Keeps the most recent responses: at most ``count``, for ``seconds``, and with at most ``size`` characters in
    total. Thread-safe."""

    count: int = 1000
    seconds: float = 3600.0
    size: int = 64 * 2**20
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._kept: dict[str, Stored] = {}  # oldest first
        self._size = 0
        self._lock = threading.Lock()

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Store a response, unless it alone exceeds ``size``; evict the oldest as needed."""
        texts = json.dumps(response, ensure_ascii=False), json.dumps(messages, ensure_ascii=False)
        made = Stored(*texts, self.clock() + self.seconds)
        with self._lock:
            if made.size <= self.size:
                self._kept[response["id"]] = made
                self._size += made.size
            while len(self._kept) > self.count or self._size > self.size:
                self._drop(next(iter(self._kept)))

    def get(self, id: str) -> Stored | None:
        """Return the stored response ``id``, None if unknown or expired."""
        with self._lock:
            while self._kept and next(iter(self._kept.values())).until <= self.clock():
                self._drop(next(iter(self._kept)))
            return self._kept.get(id)

    def delete(self, id: str) -> bool:
        """Delete ``id``. Return False if it is unknown."""
        known = self.get(id) is not None
        with self._lock:
            self._drop(id)
        return known

    def _drop(self, id: str) -> None:
        dropped = self._kept.pop(id, None)
        self._size -= 0 if dropped is None else dropped.size


def chat_of(request: ResponsesRequest, store: ResponseStore) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """Return the request as a chat, and its messages without the instructions, which hold for one response only.
    RequestError: an item or field is malformed, or the previous response is unknown."""
    if request.n != 1:
        raise RequestError("n: a response has exactly one answer", "n")
    history: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        previous = store.get(request.previous_response_id)
        if previous is None:
            where = "previous_response_id"
            raise RequestError(f"{where}: no such response, or it expired", where)
        history = json.loads(previous.messages)
    history += messages_of_items(request.input)
    first = [{"role": "system", "content": request.instructions}] if request.instructions else []
    shared = (request.model_fields_set & set(ChatRequest.model_fields)) - _RENAMED
    fields = {name: getattr(request, name) for name in shared}
    fields |= {"messages": first + history, "max_completion_tokens": request.max_output_tokens}
    check_names(request.reasoning, ("effort",), {"summary": ("auto",)}, inside="reasoning.")
    fields["reasoning_effort"] = request.reasoning.get("effort")
    if request.tools:
        fields |= {"tools": _tools(request.tools), "tool_choice": _choice(request.tool_choice)}
    fields |= _format(request.text)
    return ChatRequest.model_validate(fields), history


def _tools(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise RequestError("tools: expected a list of functions", "tools")
    made = []
    for place, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(
                f"tools.{place}: only tools of type 'function' are supported", f"tools.{place}"
            )
        named = {
            name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None
        }
        made.append({"type": "function", "function": named})
    return made


def _choice(given: Any) -> Any:
    """Convert a choice of a function: its name is at the top level here, nested in chats."""
    flat = isinstance(given, dict) and given.get("type") == "function" and "function" not in given
    return {"type": "function", "function": {"name": given.get("name")}} if flat else given


def _format(given: Any) -> dict[str, Any]:
    """Return the text format as a chat's ``response_format``."""
    form = given.get("format") if isinstance(given, dict) else None
    if form is None:
        return {}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    if not isinstance(form, dict):
        raise RequestError(f"text.format: expected an object, not {kind_of(form)}", "text.format")
    return {"response_format": form}


def messages_of_items(given: Any) -> list[dict[str, Any]]:
    """Convert a text or a list of items to chat messages. RequestError: an item is malformed."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("input: expected a string or a list of at least one item", "input")
    made: list[dict[str, Any]] = []
    thought = ""
    for place, item in enumerate(given):
        where = f"input.{place}"
        if not isinstance(item, dict):
            raise RequestError(f"{where}: expected an object, not {kind_of(item)}", where)
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _joined(item.get("content") or item.get("summary") or [], where)
            continue
        if kind == "message":
            made.append(_message(item, where))
        elif kind == "function_call":
            _add_call(made, item, thought, where)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _joined(output, f"{where}.output")
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            shown = repr(kind[:64]) if isinstance(kind, str) else kind_of(kind)
            raise RequestError(f"{where}.type: {shown} is not supported", f"{where}.type")
        if thought and made[-1]["role"] == "assistant":
            made[-1].setdefault("reasoning", thought)
        thought = ""
    return made


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role is missing", f"{where}.role")
    text = content if isinstance(content, str) else _joined(content, f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": text}


def _joined(parts: Any, where: str) -> str:
    if not isinstance(parts, list):
        raise RequestError(f"{where}: expected a string or a list of text parts, not {kind_of(parts)}", where)
    made = []
    for part in parts:
        known = isinstance(part, dict) and part.get("type") in (*_TEXTS, "reasoning_text", "summary_text")
        if not known or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}: only text parts are supported", where)
        made.append(part["text"])
    return "".join(made)


def _add_call(made: list[dict[str, Any]], item: dict[str, Any], thought: str, where: str) -> None:
    """Add a call to the previous message if it is the assistant's and no reasoning intervenes, else to a new one."""
    if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
        raise RequestError(f"{where}: a function_call needs a name and a call_id", where)
    function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
    if not made or made[-1]["role"] != "assistant" or thought:
        made.append({"role": "assistant", "content": ""})
    made[-1].setdefault("tool_calls", []).append(
        {"id": item["call_id"], "type": "function", "function": function}
    )


class ResponseAnswer:
    """Builds one response: its items as they are completed, and their events.

    Args:
        request: the request. ``model``: model name in the response.
        messages: of the conversation, to which the answer is appended.
    """

    def __init__(self, request: ResponsesRequest, model: str, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self.is_kept = request.store
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.get("effort"), "summary": None},
            "store": request.store,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self._item: dict[str, Any] | None = None  # the item in progress
        self._text: list[str] = []  # its text so far
        self._number = 0

    def begin(self) -> list[dict[str, Any]]:
        """Return the first events."""
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def add(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """Add parts of the answer; return their events."""
        events = []
        for piece in pieces:
            if piece.kind == "call" or self._item is None or self._item["type"] != _ITEMS[piece.kind]:
                events += self._close("completed")
                events += self._open(piece)
            if piece.kind != "call":
                self._text.append(piece.text)
                more = {**_MORE.get(piece.kind, {}), **self._place()}
                events.append(self._event(_DELTAS[piece.kind], delta=piece.text, **more))
        return events

    def end(self, reason: str | None, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the last events. ``reason``: finish reason as in chats; ``usage``: see `usage_of_response`."""
        cut = reason == "length"
        events = self._close("incomplete" if cut else "completed")
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = usage
        self.messages += messages_of_items(self.response["output"]) if self.response["output"] else []
        return [*events, self._whole(f"response.{self.response['status']}")]

    def fail(self, message: str) -> dict[str, Any]:
        """Return the event of a failed response."""
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return self._whole("response.failed")

    def _open(self, piece: Piece) -> list[dict[str, Any]]:
        unique = uuid.uuid4().hex
        if piece.kind == "call":
            self._item = {
                "id": f"fc_{unique}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": piece.id,
                "name": piece.text,
                "arguments": "",
            }
        elif piece.kind == "reasoning":
            self._item = {"id": f"rs_{unique}", "type": "reasoning", "summary": [], "content": []}
        else:
            self._item = {
                "id": f"msg_{unique}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        self._text = []
        index = len(self.response["output"])
        events = [self._event("response.output_item.added", output_index=index, item=dict(self._item))]
        if piece.kind != "call":
            events.append(self._event("response.content_part.added", part=self._part(""), **self._place()))
        return events

    def _close(self, status: str) -> list[dict[str, Any]]:
        item, text = self._item, "".join(self._text)
        if item is None:
            return []
        place, kind = self._place(), item["type"]
        if kind == "function_call":
            events = [
                self._event(
                    "response.function_call_arguments.done", name=item["name"], arguments=text, **place
                )
            ]
            item["arguments"] = text
        else:
            part = self._part(text)
            name = "reasoning" if kind == "reasoning" else "text"
            done = _DELTAS[name].replace(".delta", ".done")
            events = [
                self._event(done, text=text, **_MORE.get(name, {}), **place),
                self._event("response.content_part.done", part=part, **place),
            ]
            item["content"] = [part]
        item["status"] = status
        self.response["output"].append(item)
        self._item = None
        index = len(self.response["output"]) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _part(self, text: str) -> dict[str, Any]:
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.response["output"])}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}

    def _whole(self, name: str) -> dict[str, Any]:
        return self._event(name, response={**self.response, "output": list(self.response["output"])})

    def _event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def usage_of_response(usage: dict[str, int], reasoning: int) -> dict[str, Any]:
    """Convert a chat's token counts to the names of the Responses API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
