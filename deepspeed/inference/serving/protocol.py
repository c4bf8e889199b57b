"""Requests and answers as the clients of OpenAI's HTTP interface write and read them. Pure."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed.inference.scheduling.requests import SamplingParams

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
}
"""Fields that would change an answer and are not known here, with the values that change nothing."""

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

    model: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    n: int = Field(default=1, ge=1, le=128)
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
    return request


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """One or several, as texts or tokens. RequestError: there is none."""
    prompt: Any = request.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt or not all(prompt):
        raise RequestError("the prompt is empty", "prompt")
    return prompt


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
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        stop_token_ids=() if request.ignore_eos else stop_token_ids,
        seed=None if request.seed is None else request.seed + index,
        logprobs=bool(getattr(request, "logprobs", None)),
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
            told = {"content": [{"token": text, "logprob": value} for text, value in logprobs]}
        elif logprobs is not None:
            told = {
                "tokens": [text for text, _ in logprobs],
                "token_logprobs": [value for _, value in logprobs],
            }
        return {"logprobs": told, "finish_reason": reason}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def error(message: str, kind: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}
