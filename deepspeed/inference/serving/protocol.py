"""Requests and responses of OpenAI's HTTP interface. Pure."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    model_validator,
)

from deepspeed.inference.scheduling.requests import SamplingParams
from deepspeed.inference.serving.bodies import JsonBudget, RequestError, fields_of, kind_of
from deepspeed.inference.serving.fields import NAME_LENGTH, STREAM_OPTIONS, check_names
from deepspeed.inference.serving.pieces import Piece
from deepspeed.inference.serving.sampling_fields import tokens_of
from deepspeed.inference.serving.tool_requests import with_calls

_MAX_TOKENS = 2**31
_STOPS, _STOP_LENGTH = 16, 1000
_COLDEST = 1e-5
"""Lowest temperature above 0: some clients send 1e-8 and mean 0."""

_MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""

_MESSAGE_LENGTH = 1000
"""Maximum characters of an error message, which may quote a client's input."""

MAX_LOGPROBS = 20
"""Maximum number of most probable tokens per position."""

_NO_VARIABLES = {
    "chat_template", "tools", "tokenize", "conversation", "messages", "return_dict", "tokenizer_kwargs",
}  # fmt: skip
"""Other arguments with which a chat template is applied."""

Effort = Annotated[str, Field(max_length=NAME_LENGTH)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("-1 (as many tokens as the model takes) or at least 1 is expected")
    return value


Truncation = Annotated[int | None, Field(ge=-1), AfterValidator(_not_zero)]
"""Of a prompt, to its last tokens."""

_SAME_NAMES = ("top_k", "top_p", "min_p", "repetition_penalty", "priority")
"""Fields of a request that are parameters of its sequences."""

REASONS = {"stop": "stop", "length": "length"}


class _Sampling(BaseModel):
    """Fields of both kinds of request: OpenAI's, and those of vLLM with the same meaning.

    Lists are validated by the functions below, which stop at the first error: pydantic would create one per element and
    candidate type.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    model: str = ""
    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Annotated[int, BeforeValidator(lambda value: 0 if value == -1 else value)] = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: SkipValidation[dict[str, float] | None] = None
    allowed_token_ids: SkipValidation[list[int] | None] = None
    bad_words: SkipValidation[list[str] | None] = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: SkipValidation[list[str] | None] = None
    guided_grammar: Any = None
    n: int = Field(default=1, ge=1, le=128)
    best_of: int | None = None
    seed: int | None = None
    stop: SkipValidation[str | list[str] | None] = None
    stop_token_ids: SkipValidation[list[int] | None] = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: Truncation = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    ignore_eos: bool = False
    priority: Priority = 0
    skip_special_tokens: bool = True


class CompletionRequest(_Sampling):
    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    echo: bool = False
    logprobs: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        default=None, ge=0, le=MAX_LOGPROBS
    )
    add_special_tokens: bool = True


class ChatRequest(_Sampling):
    messages: SkipValidation[list[dict[str, Any]]]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    tools: SkipValidation[list[Any] | None] = None
    tool_choice: SkipValidation[str | dict[str, Any]] = "auto"
    parallel_tool_calls: bool = True
    add_special_tokens: Literal[False] = False

    @model_validator(mode="after")
    def _without_tools(self) -> ChatRequest:
        """Clear fields that have no meaning without tools."""
        if not self.tools:
            self.tools, self.parallel_tool_calls = None, True
            self.tool_choice = "auto" if self.tool_choice == "none" else self.tool_choice
        return self


class ResponsesRequest(_Sampling):
    """A request for a response (`responses.py`), answered as a chat."""

    input: SkipValidation[str | list[dict[str, Any]]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = None
    store: bool = True
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Effort | None] = {}
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: SkipValidation[list[Any] | None] = None
    tool_choice: SkipValidation[str | dict[str, Any]] = "auto"
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """A sequence to generate."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    prefix: str = ""


def fields_as(kind: type[BaseModel], body: bytes) -> Any:
    """Parse a body as a ``kind``. RequestError: it is not JSON, or a field is unknown, missing or out of range. Takes
    up to 0.2 s for 4 MiB."""
    # Many clients write null for unset fields.
    fields = {name: value for name, value in fields_of(body).items() if value is not None}
    check_names(fields, kind.model_fields)
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{where}: {first['msg']}", where) from error
    return request


def parse(kind: type[_Sampling], body: bytes) -> Any:
    """Parse a generation request. RequestError: see ``fields_as``; or a field would change the answer in an unsupported
    way."""
    request = fields_as(kind, body)
    check_names(request.stream_options or {}, STREAM_OPTIONS, {}, inside="stream_options.")
    if request.best_of not in (None, request.n):
        raise RequestError("best_of is not supported, other than n", "best_of")
    stops_of(request)
    return request


def texts_of(given: Any, name: str) -> list[str | list[int]]:
    """Return the field ``name`` as a list of texts or of lists of tokens. RequestError: it is missing, or has another
    type."""
    if isinstance(given, list) and given and type(given[0]) is not int:
        prompts = given
    else:
        prompts = [given]
    for place, prompt in enumerate(prompts):
        where = f"{name}.{place}" if prompts is given else name
        if not isinstance(prompt, (str, list)):
            raise RequestError(f"{where}: expected strings or tokens, not {kind_of(prompt)}", where)
        if type(prompt) is not type(prompts[0]):
            raise RequestError(f"{where}: expected either strings or tokens, not both", where)
        if not prompt:
            raise RequestError(f"the {name} is empty", where)
        if isinstance(prompt, list):
            check_tokens(prompt, where)
    return prompts


def check_tokens(tokens: list[Any], where: str) -> None:
    """Check token ids. RequestError: one is not an integer, or outside the range of any tokenizer."""
    for place, token in enumerate(tokens):
        if type(token) is int and 0 <= token < _MAX_TOKENS:  # True is an instance of int
            continue
        where = f"{where}.{place}"
        problem = (
            f"{token} is not a token" if type(token) is int else f"expected an integer, not {kind_of(token)}"
        )
        raise RequestError(f"{where}: {problem}", where)


def messages_of(request: Any) -> list[dict[str, Any]]:
    """Return messages with one text as content each, as templates expect. RequestError: there is none, one is not an
    object with a role, a part of its content is not text, or its calls are malformed."""
    given: Any = request.messages
    if not isinstance(given, list) or not given:
        raise RequestError("messages: expected a list of at least one message", "messages")
    made, budget = [], JsonBudget()
    for place, message in enumerate(given):
        where = f"messages.{place}"
        if not isinstance(message, dict):
            raise RequestError(f"{where}: expected an object, not {kind_of(message)}", where)
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where}.role is missing", f"{where}.role")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text_of(part, f"{where}.content") for part in content)
        elif not isinstance(content, (str, type(None))):
            raise RequestError(
                f"{where}.content must be a string or a list of text parts", f"{where}.content"
            )
        made.append(with_calls({**message, "content": content or ""}, where, budget))
    return made


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if not isinstance(part, dict):
        raise RequestError(f"{where}: a part must be an object, not {kind_of(part)}", where)
    kind = part.get("type")
    shown = repr(kind[:NAME_LENGTH]) if isinstance(kind, str) else kind_of(kind)
    if kind == "text":
        raise RequestError(f"{where}: the text of a part is {kind_of(part.get('text'))}", where)
    raise RequestError(f"{where}: parts of type {shown} are not supported, only 'text'", where)


def wants_logprobs(request: _Sampling) -> bool:
    """Return whether log-probabilities are requested: by 0 or more in completions, by True in chats."""
    asked = getattr(request, "logprobs", None)
    return asked is not None and asked is not False


def top_logprobs_of(request: _Sampling) -> int:
    """Return the number of most probable tokens whose log-probabilities are requested. RequestError: it is set, but
    log-probabilities are off."""
    if isinstance(request, CompletionRequest):
        return request.logprobs or 0
    top: int = getattr(request, "top_logprobs", 0)
    if top and not wants_logprobs(request):
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return top


def template_of(request: Any) -> dict[str, Any]:
    """Return the arguments of the chat template. RequestError: they contradict each other."""
    goes_on = request.continue_final_message
    if goes_on and request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    for name in _NO_VARIABLES & set(request.chat_template_kwargs or {}):
        where = f"chat_template_kwargs.{name}"
        raise RequestError(f"{where} is not a template variable", where)
    own = {"add_generation_prompt": request.add_generation_prompt and not goes_on}
    own |= {"continue_final_message": True} if goes_on else {}
    return {**(request.chat_template_kwargs or {}), **own}


def own_template_of(request: ChatRequest, trusted: bool) -> dict[str, Any]:
    """Return the chat template in the request, if any. RequestError: clients' templates are not ``trusted``, since they
    may run forever."""
    if request.chat_template is None:
        return {}
    if not trusted:
        raise RequestError(
            "chat_template is not supported: start the server with --trust-request-chat-template",
            "chat_template",
        )
    return {"chat_template": request.chat_template}


def effort_of(request: ChatRequest, template: str) -> dict[str, Any]:
    """Return the variable of ``template`` that tells how long to reason. RequestError: it has no such variable."""
    effort, name = request.reasoning_effort, "reasoning_effort"
    if effort is None or (effort == "none" and name not in template):
        return {}
    if name not in template:
        raise RequestError(f"{name} is not supported, other than none: the chat template has no {name}", name)
    return {name: effort}


def stops_of(request: _Sampling) -> list[str]:
    """Return the stop texts. RequestError: too many, or one is too long or not text."""
    stop: Any = request.stop
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > _STOPS:
        raise RequestError(f"stop: expected a string or a list of up to {_STOPS}", "stop")
    for each in stops:
        if not isinstance(each, str) or len(each) > _STOP_LENGTH:
            raise RequestError(f"stop: expected a string of up to {_STOP_LENGTH} characters", "stop")
    return stops


def asked_tokens(request: _Sampling) -> int | None:
    """Return how many new tokens a request asks for at most; None: it does not say."""
    return getattr(request, "max_completion_tokens", None) or request.max_tokens


def last_of(tokens: list[int], most: int | None) -> list[int]:
    """Return the last ``most`` tokens; None: all, the same object."""
    return tokens if most is None or len(tokens) <= most else tokens[-most:]


def params_of(
    request: _Sampling, index: int, prompt: int, model: Any, shared: Mapping[str, Any]
) -> SamplingParams:
    """Return the parameters of the sequence ``index`` of a prompt of ``prompt`` tokens. ``model``: a ``ServedModel``;
    ``shared``: those of all sequences (`sampling_fields.py`). RequestError: more tokens are asked for than fit."""
    asked, most = asked_tokens(request), model.max_length
    least, room = 1 if asked is None else asked, most - prompt
    if room < least:
        detail = f"the prompt of {prompt} leaves room for {max(0, room)} tokens, but {least} were requested"
        limit = f"this model's maximum context length is {most} tokens"
        raise RequestError(f"{limit}: {detail}", "max_tokens", "context_length_exceeded")
    new = min(model.default_tokens, room) if asked is None else asked
    logprobs = wants_logprobs(request)
    stops = tokens_of(request.stop_token_ids, "stop_token_ids")
    return SamplingParams(
        max_new_tokens=new,
        min_new_tokens=min(request.min_tokens, new),
        temperature=0.0 if request.temperature < _COLDEST else request.temperature,
        **{name: getattr(request, name) for name in _SAME_NAMES},
        stop_token_ids=(() if request.ignore_eos else model.stop_token_ids) + stops,
        seed=None if request.seed is None else request.seed + index,
        logprobs=logprobs,
        top_logprobs=top_logprobs_of(request),
        prompt_logprobs=logprobs and getattr(request, "echo", False),
        **shared,
    )


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """Log-probability of a token with its text; ``value`` is None for a prompt's first token. ``top``: the most
    probable tokens, including the chosen one. ``offset``: of the text, in characters of the answer."""

    text: str
    value: float | None
    top: Sequence[tuple[str, float]] = ()
    offset: int = 0


@dataclass(slots=True)
class Answer:
    """Fields common to all parts of an answer."""

    chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def content(
        self, choices: Sequence[Mapping[str, Any]], *, is_event: bool = False, **more: Any
    ) -> dict[str, Any]:
        """Return a whole answer, or one event of a stream, with the fields ``more``."""
        prefix, name = ("chatcmpl", "chat.completion") if self.chat else ("cmpl", "text_completion")
        name += ".chunk" if self.chat and is_event else ""
        head = {"id": f"{prefix}-{self.id}", "object": name, "created": self.created, "model": self.model}
        return {**head, "choices": list(choices), **more}

    def choice(
        self, index: int, pieces: Sequence[Piece], reason: str | None, logprobs: Sequence[TextLogprob] | None
    ) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        content: dict[str, Any] = {"text": _text(pieces)}
        if self.chat:
            message = {"content": "", **_message_fields(pieces)}
            for call in message.get("tool_calls", ()):
                del call["index"]
                message["content"] = message["content"] or None
            content = {"message": {"role": "assistant", **message}}
        return {"index": index, **content, **self._end(reason, logprobs)}

    def delta(
        self,
        index: int,
        pieces: Sequence[Piece],
        reason: str | None,
        logprobs: Sequence[TextLogprob] | None,
        first: bool,
    ) -> dict[str, Any]:
        """Return a choice of a stream's event."""
        content: dict[str, Any] = {"text": _text(pieces)}
        if self.chat:
            role = {"role": "assistant", "content": ""} if first else {}
            content = {"delta": {**role, **_message_fields(pieces)}}
        return {"index": index, **content, **self._end(reason, logprobs)}

    def _end(self, reason: str | None, logprobs: Sequence[TextLogprob] | None) -> dict[str, Any]:
        formatted: Any = None
        if logprobs is not None and self.chat:
            formatted = {"content": [_chat_logprob(each) for each in logprobs], "refusal": None}
        elif logprobs is not None:
            tops = [_by_text(each.top) for each in logprobs]
            formatted = {
                "tokens": [each.text for each in logprobs],
                "token_logprobs": [None if each.value is None else _finite(each.value) for each in logprobs],
                "top_logprobs": [top or None for top in tops] if any(tops) else None,
                "text_offset": [each.offset for each in logprobs],
            }
        return {"logprobs": formatted, "finish_reason": reason}


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(each.text for each in pieces if each.kind == "text")


def _message_fields(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the non-empty parts of a message: content, reasoning under both of its names, calls."""
    fields: dict[str, Any] = {}
    text, thought = _text(pieces), "".join(each.text for each in pieces if each.kind == "reasoning")
    if text:
        fields["content"] = text
    if thought:
        fields["reasoning_content"] = fields["reasoning"] = thought
    calls: dict[int, dict[str, Any]] = {}
    for each in pieces:
        if each.kind == "call":
            function = {"name": each.text, "arguments": ""}
            calls[each.index] = {"index": each.index, "id": each.id, "type": "function", "function": function}
        elif each.kind == "arguments":
            call = calls.setdefault(each.index, {"index": each.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += each.text
    return {**fields, "tool_calls": list(calls.values())} if calls else fields


def _by_text(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Map texts to log-probabilities; of several tokens with one text, such as partial characters, keep the most
    probable, which comes first."""
    found: dict[str, float] = {}
    for text, value in top:
        found.setdefault(text, _finite(value))
    return found


def _chat_logprob(entry: TextLogprob) -> dict[str, Any]:
    top = [_entry(text, value) for text, value in entry.top]
    return {**_entry(entry.text, entry.value or 0.0), "top_logprobs": top}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """Return an entry. ``bytes`` is null if a token is not a whole character: its text does not determine its bytes."""
    whole = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": whole}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def error(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    if len(message) > _MESSAGE_LENGTH:
        message = f"{message[:_MESSAGE_LENGTH]} ..."
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
