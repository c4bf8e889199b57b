"""Requests and answers as the clients of OpenAI's HTTP interface write and read them. Pure."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepspeed.inference.scheduling.requests import SamplingParams

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "prompt_logprobs": (None, 0),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "include_stop_str_in_output": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
}
"""Fields that would change an answer and are not known here, with the values that change nothing."""

_STOPS, _STOP_LENGTH = 16, 1000
_COLDEST = 1e-5
"""Some clients write a temperature of 1e-8 and mean 0."""

_LEAST_LOGPROB = -9999.0
"""Instead of minus infinity, which JSON does not have."""

REASONS = {"stop": "stop", "length": "length"}


class RequestError(ValueError):
    """A request that cannot be served. ``field``: which part of it, if one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class _Sampling(BaseModel):
    """What both kinds of request have. ``top_k``, ``min_p``, ``repetition_penalty`` and ``min_tokens`` are beyond
    OpenAI's."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def leaves_out_nulls(cls, values: Any) -> Any:
        """Many clients write null for what they do not set."""
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values

    model: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    n: int = Field(default=1, ge=1, le=128)
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    ignore_eos: bool = False


class CompletionRequest(_Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=1)


class ChatRequest(_Sampling):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence to generate."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    prefix: str = ""


def parse(kind: type[_Sampling], body: bytes) -> Any:
    """RequestError: the body is no JSON, a field is missing or out of range, or would change the answer in a way that
    is not known here."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{where or 'body'}: {first['msg']}", where or None) from error
    for name, value in (request.model_extra or {}).items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise RequestError(f"{name} is not supported", name)
    if request.best_of not in (None, request.n):
        raise RequestError("best_of is not supported, other than n", "best_of")
    stops = stops_of(request)
    if len(stops) > _STOPS or any(len(stop) > _STOP_LENGTH for stop in stops):
        raise RequestError(f"stop: at most {_STOPS} texts of {_STOP_LENGTH} characters", "stop")
    return request


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """One or several, as texts or tokens. RequestError: there is none."""
    prompt: Any = request.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt or not all(prompt):
        raise RequestError("the prompt is empty", "prompt")
    return prompt


def messages_of(request: ChatRequest) -> list[dict[str, Any]]:
    """Messages with contents of one text each, as templates expect them. RequestError: one has no role, or a part of
    its content is no text."""
    made = []
    for place, message in enumerate(request.messages):
        where = f"messages.{place}"
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where}.role is missing", f"{where}.role")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text_of(part, f"{where}.content") for part in content)
        elif not isinstance(content, (str, type(None))):
            raise RequestError(f"{where}.content is neither a text nor a list of texts", f"{where}.content")
        made.append({**message, "content": content or ""})
    return made


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(f"{where}: parts of type {kind!r} are not supported, only 'text'", where)


def wants_logprobs(request: _Sampling) -> bool:
    """Of completions, 0 asks for those of the tokens of the answer; of chats, True does."""
    asked = getattr(request, "logprobs", None)
    return asked is not None and asked is not False


def stops_of(request: _Sampling) -> list[str]:
    stop = request.stop
    return [stop] if isinstance(stop, str) else stop or []


def params_of(
    request: _Sampling, index: int, room: int, default: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Of the sequence ``index`` of a prompt, after which ``room`` tokens fit; ``default`` if the request does not say
    how many. RequestError: more are asked for than fit."""
    asked = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if room < 1 or (asked is not None and asked > room):
        raise RequestError(
            f"the prompt leaves room for {max(0, room)} tokens, {asked or 1} are asked for", "max_tokens"
        )
    new = asked or min(default, room)
    return SamplingParams(
        max_new_tokens=new,
        min_new_tokens=min(request.min_tokens, new),
        temperature=0.0 if request.temperature < _COLDEST else request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        stop_token_ids=() if request.ignore_eos else stop_token_ids,
        seed=None if request.seed is None else request.seed + index,
        logprobs=wants_logprobs(request),
    )


@dataclass(slots=True)
class Answer:
    """What all parts of one answer have in common."""

    chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        name = "chat.completion" if self.chat else "text_completion"
        return {**self._head(name), "choices": list(choices), "usage": dict(usage)}

    def part(
        self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """One event of a stream."""
        name = "chat.completion.chunk" if self.chat else "text_completion"
        made = {**self._head(name), "choices": list(choices)}
        return made if usage is None else {**made, "usage": dict(usage)}

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Sequence[tuple[str, float]] | None
    ) -> dict[str, Any]:
        """Of a whole answer."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text}}
        return {"index": index, **content, **self._end(reason, logprobs)}

    def delta(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[tuple[str, float]] | None,
        first: bool,
    ) -> dict[str, Any]:
        """Of a stream."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            role = {"role": "assistant"} if first else {}
            content = {"delta": {**role, "content": text} if text or first else {}}
        return {"index": index, **content, **self._end(reason, logprobs)}

    def _head(self, name: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": name, "created": self.created, "model": self.model}

    def _end(self, reason: str | None, logprobs: Sequence[tuple[str, float]] | None) -> dict[str, Any]:
        told: Any = None
        if logprobs is not None and self.chat:
            told = {"content": [_told(text, value) for text, value in logprobs], "refusal": None}
        elif logprobs is not None:
            told = {
                "tokens": [text for text, _ in logprobs],
                "token_logprobs": [_finite(value) for _, value in logprobs],
                "top_logprobs": None,
            }
        return {"logprobs": told, "finish_reason": reason}


def _told(text: str, logprob: float) -> dict[str, Any]:
    """``bytes`` is null where a token is no whole character: its text does not say which bytes it has."""
    whole = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": whole, "top_logprobs": []}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def error(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
