"""The HTTP server: OpenAI's completions and chats, health and metrics. Imported only where FastAPI is installed."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.bodies import LONG
from deepspeed.inference.serving.pieces import Piece
from deepspeed.inference.serving.protocol import (
    Answer,
    ChatRequest,
    Choice,
    CompletionRequest,
    RequestError,
    ResponsesRequest,
)
from deepspeed.inference.serving.responses import ResponseAnswer, ResponseStore, chat_of, usage_of_response
from deepspeed.inference.serving.sampling_fields import sampling_of
from deepspeed.inference.serving.sequences import ECHOED, RunningAnswer, read_all, read_into, usage_of
from deepspeed.inference.serving.service import BusyError, ClosedError, Service
from deepspeed.inference.serving.text import TextStream
from deepspeed.inference.serving.tokenizers import Tokenizer
from deepspeed.inference.serving.tool_requests import AnswerForm, Formats, answer_form, tools_of
from deepspeed.observe.live.access import check_token, names_this_machine

_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""Many clients split events where Python's ``splitlines`` does; JSON lets these three stand in a text as they are."""

_END = 24
"""Tokens of a prompt's end that tell whether it opens or closes reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """``model``: the name in answers. ``token``: that clients have to send; None: none, and only requests to a name of
    this machine are answered. ``max_length``: tokens of a prompt and its answer. ``default_tokens``: of an answer
    if the client does not say. ``max_body_bytes``: of a request; ``body_seconds``: in which it has to arrive.
    ``formats``: of calls and reasoning; ``trust_templates``: a request may bring its own template."""

    model: str
    max_length: int
    stop_token_ids: tuple[int, ...] = ()
    token: str | None = None
    default_tokens: int = 1024
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 60.0
    formats: Formats = Formats()
    trust_templates: bool = False

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token, "token")


def make_app(service: Service, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """The application; whoever runs it starts and closes ``service``."""
    app = FastAPI(title="deepspeed", docs_url=None, redoc_url=None, openapi_url=None)
    server = _Server(service, tokenizer, settings)
    if settings.token is None:
        app.add_middleware(_ThisMachineOnly)

    @app.get("/health")
    async def health() -> Response:
        healthy = service.healthy
        why = {} if healthy or service.failure is None else {"error": str(service.failure)}
        return JSONResponse({"status": "ok" if healthy else "unavailable", **why}, 200 if healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(
            service.metrics.text(service.state()), media_type="text/plain; version=0.0.4"
        )

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if not server.authorize(request):
            return _unauthorized()
        return JSONResponse({"object": "list", "data": [server.model()]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if not server.authorize(request):
            return _unauthorized()
        try:
            server.check_model(name)
        except _ModelError as problem:
            return _unknown_model(problem)
        return JSONResponse(server.model())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await server.answer(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chats(request: Request) -> Response:
        return await server.answer(request, ChatRequest)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await server.answer(request, ResponsesRequest)

    @app.get("/v1/responses/{id}")
    async def response(request: Request, id: str) -> Response:
        if not server.authorize(request):
            return _unauthorized()
        found = server.store.get(id)
        return _no_response(id) if found is None else Response(found.response, media_type="application/json")

    @app.delete("/v1/responses/{id}")
    async def forget(request: Request, id: str) -> Response:
        if not server.authorize(request):
            return _unauthorized()
        if not server.store.delete(id):
            return _no_response(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, problem: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {problem.detail}"
        return _refusal(problem.status_code, message, "invalid_request_error", headers=problem.headers)

    return app


def endpoints(app: FastAPI) -> list[str]:
    """The paths without a part that varies."""
    paths = [getattr(route, "path", "{") for route in app.routes]
    return [path for path in paths if "{" not in path]


class _ThisMachineOnly:
    """In front of a server without a token."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and not names_this_machine(Headers(scope=scope).get("host", "")):
            message = "the server is for this machine only, and the header Host names another: start it with a token"
            answer = _refusal(403, message, "permission_error")
        await answer(scope, receive, send)


class _Server:
    def __init__(self, service: Service, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.settings = settings
        self.store = ResponseStore()
        self._special_ids = {text: token for token, text in tokenizer.specials.items()}
        self._began = int(time.time())
        # Parsing and tokenizing. Long requests, which may take seconds, wait for each other only. Few threads: each
        # keeps memory of its own.
        self._short = ThreadPoolExecutor(2, "short-requests")
        self._long = ThreadPoolExecutor(2, "long-requests")

    def model(self) -> dict[str, Any]:
        name = self.settings.model
        return {"id": name, "object": "model", "created": self._began, "owned_by": "deepspeed"}

    def check_model(self, name: str) -> None:
        """_ModelError: there is no model of this name."""
        if name != self.settings.model:
            raise _ModelError(f"there is no model {name!r}, only {self.settings.model!r}")

    def authorize(self, request: Request) -> bool:
        token = self.settings.token
        if token is None:
            return True
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    async def answer(self, request: Request, kind: Any) -> Response:
        if not self.authorize(request):
            return _unauthorized()
        try:
            body, loop = await self._body(request), asyncio.get_running_loop()
            threads = self._long if sum(map(len, body)) > LONG else self._short
            begun = await loop.run_in_executor(threads, self._begin, kind, body, loop)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except asyncio.TimeoutError:
            seconds = self.settings.body_seconds
            return _refusal(408, f"the request was not there within {seconds:g} s", "invalid_request_error")
        except _TooLargeError as problem:
            return _refusal(413, str(problem), "invalid_request_error")
        except _ModelError as problem:
            return _unknown_model(problem)
        except RequestError as problem:
            return _refusal(400, str(problem), "invalid_request_error", problem.field)
        except ValueError as problem:
            return _refusal(400, str(problem), "invalid_request_error")
        except BusyError as problem:
            return _refusal(429, str(problem), "rate_limit_error", headers={"Retry-After": "1"})
        except ClosedError as problem:
            return _refusal(503, str(problem), "server_error")
        if begun.response is not None:
            return await self._respond(request, begun.response, begun.sequences, begun.stream)
        answer = Answer(kind is ChatRequest, self.settings.model)
        if begun.stream:
            events = self._events(answer, begun.sequences, begun.logprobs, begun.counted)
            return _EventStream(events, begun.sequences)
        return await self._whole(request, answer, begun.sequences, begun.logprobs)

    async def _body(self, request: Request) -> list[bytes]:
        """Read the parts of a body. TimeoutError: they do not come in time. _TooLargeError: they are too long."""
        most = self.settings.max_body_bytes
        too_large = _TooLargeError(f"a request has at most {most} bytes")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise too_large  # before memory is taken for it

        async def read() -> list[bytes]:
            parts, size = [], 0
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise too_large
            return parts

        return await asyncio.wait_for(read(), self.settings.body_seconds)

    def _begin(self, kind: Any, body: list[bytes], loop: asyncio.AbstractEventLoop) -> _Begun:
        """Parse, tokenize and submit, on a thread beside ``loop``, where the updates arrive.

        What is parsed, up to 500,000 values, is freed here too, which takes 10 ms: errors leave without their frames.
        """
        try:
            return self._submitted(protocol.parse(kind, b"".join(body)), loop)
        except (ValueError, BusyError, ClosedError) as problem:
            problem.__context__ = None
            raise problem.with_traceback(None) from None

    def _submitted(self, request: Any, loop: asyncio.AbstractEventLoop) -> _Begun:
        self.check_model(request.model or self.settings.model)
        response = None
        if isinstance(request, ResponsesRequest):
            given = request
            request, messages = chat_of(given, self.store)
            response = ResponseAnswer(given, self.settings.model, messages)
        choices, form = self._choices(request)
        sequences = self._submit(choices, request, loop, form)
        counted = bool((request.stream_options or {}).get("include_usage"))
        return _Begun(sequences, request.stream, counted, protocol.wants_logprobs(request), response)

    def _choices(self, request: Any) -> tuple[list[Choice], AnswerForm | None]:
        settings, made, form = self.settings, [], None
        if isinstance(request, ChatRequest):
            self._check_count(1, request.n)
            tokens, form = self._chat(request)
            prompts = iter([("", _cut(tokens, request.truncate_prompt_tokens))])
        else:
            given = protocol.prompts_of(request)
            self._check_count(len(given), request.n)
            # One by one: those after the first that does not fit are not tokenized.
            prompts = (self._tokens(each, request) for each in given)
        shared = sampling_of(request, self.tokenizer.words)
        if form is not None:
            shared["constraint"] = form.constraint(shared["constraint"], self._special_ids)
        for prefix, tokens in prompts:
            room = settings.max_length - len(tokens)
            for index in range(request.n):
                params = protocol.params_of(
                    request, index, room, settings.default_tokens, settings.stop_token_ids, shared
                )
                made.append(Choice(len(made), tokens, params, prefix))
        return made, form

    def _chat(self, request: ChatRequest) -> tuple[list[int], AnswerForm]:
        """Return the tokens of a chat, and how its answers are read."""
        use, own = tools_of(request), protocol.own_template_of(request, self.settings.trust_templates)
        arguments = {
            **protocol.template_of(request),
            **own,
            **({"tools": list(use.given)} if use.given else {}),
        }
        tokens = self.tokenizer.chat(protocol.messages_of(request), arguments)
        specials, known = list(self._special_ids), self.tokenizer.specials
        end = "".join(known.get(token) or self.tokenizer.decode([token]) for token in tokens[-_END:])
        return tokens, answer_form(self.settings.formats, use, end, specials)

    def _check_count(self, prompts: int, n: int) -> None:
        """RequestError: more sequences than are ever served at one time."""
        most = self.service.max_requests
        if prompts * n > most:
            raise RequestError(
                f"prompts: {prompts}, n: {n}; their product is at most {most}, the sequences served at one time "
                "(--max-requests)",
                "n" if prompts <= most else "prompt",
            )

    def _tokens(self, prompt: str | list[int], request: CompletionRequest) -> tuple[str, list[int]]:
        """Return the text to repeat, and the tokens."""
        whole = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not whole:
            raise RequestError("the prompt is empty", "prompt")
        tokens = _cut(whole, request.truncate_prompt_tokens)
        if not request.echo:
            return "", tokens
        if isinstance(prompt, str) and tokens is whole:
            return prompt, tokens
        return self.tokenizer.decode(tokens), tokens

    def _submit(
        self,
        choices: Sequence[Choice],
        request: Any,
        loop: asyncio.AbstractEventLoop,
        form: AnswerForm | None,
    ) -> list[RunningAnswer]:
        """All or none."""
        self.service.check_room(len(choices))
        made, stops, ids = [], protocol.stops_of(request), self._special_ids
        marked = () if form is None else form.markers
        shown = {ids[mark] for mark in (marked if request.skip_special_tokens else ids) if mark in ids}
        try:
            for choice in choices:
                before = choice.prompt[-ECHOED:] if choice.prefix else ()
                text = TextStream(
                    self.tokenizer.decode,
                    stops,
                    specials=self.tokenizer.specials,
                    before=before,
                    include_stop=request.include_stop_str_in_output,
                    shown=shown,
                )
                parser = None if form is None else form.parser()
                made.append(RunningAnswer(self.service, choice, text, loop, parser))
        except BaseException:
            for each in made:
                each.cancel()
            raise
        return made

    async def _respond(
        self, request: Request, response: ResponseAnswer, sequences: Sequence[RunningAnswer], stream: bool
    ) -> Response:
        if stream:
            return _EventStream(self._response_events(response, sequences), sequences)
        answers = await self._finished(request, sequences)
        if isinstance(answers, Response):
            return answers
        response.add(answers[0])
        await self._end(response, sequences)
        return JSONResponse(response.told)

    async def _response_events(
        self, response: ResponseAnswer, sequences: Sequence[RunningAnswer]
    ) -> AsyncIterator[str]:
        """See `_events`."""
        try:
            for event in response.begin():
                yield _event(event, event["type"])
            async for pieces, _ in sequences[0].read():
                for event in response.add(pieces):
                    yield _event(event, event["type"])
            for event in await self._end(response, sequences):
                yield _event(event, event["type"])
        except ClosedError as problem:
            yield _event(response.fail(str(problem)), "response.failed")
        finally:
            for each in sequences:
                each.cancel()

    async def _end(
        self, response: ResponseAnswer, sequences: Sequence[RunningAnswer]
    ) -> list[dict[str, Any]]:
        """Remember a response before its client is told of its end. Returns the last events."""
        usage = usage_of_response(usage_of(sequences), sequences[0].reasoning_tokens)
        events = response.end(sequences[0].told_reason, usage)
        if response.is_kept:
            await asyncio.to_thread(self.store.put, response.told, response.messages)
        return events

    async def _finished(
        self, request: Request, sequences: Sequence[RunningAnswer]
    ) -> list[list[Piece]] | Response:
        """Return whole answers; or what is said instead, where nobody reads them or the service ends."""
        finished = asyncio.ensure_future(read_all(sequences))
        gone = asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                return Response(status_code=499)  # nobody reads it
            return finished.result()
        except ClosedError as problem:
            return _refusal(503, str(problem), "server_error")
        finally:
            gone.cancel()
            finished.cancel()
            for each in sequences:
                each.cancel()

    async def _whole(
        self, request: Request, answer: Answer, sequences: Sequence[RunningAnswer], logprobs: bool
    ) -> Response:
        answers = await self._finished(request, sequences)
        if isinstance(answers, Response):
            return answers
        choices = [
            answer.choice(
                each.choice.index,
                _with_prefix(each, pieces),
                each.told_reason,
                each.logprobs if logprobs else None,
            )
            for each, pieces in zip(sequences, answers, strict=True)
        ]
        return JSONResponse(answer.whole(choices, usage_of(sequences)))

    async def _events(
        self, answer: Answer, sequences: Sequence[RunningAnswer], logprobs: bool, counted: bool
    ) -> AsyncIterator[str]:
        """A client that leaves closes this iterator, and its sequences are cancelled."""
        news: asyncio.Queue[tuple[RunningAnswer, list[Piece], bool] | Exception] = asyncio.Queue()
        readers = [asyncio.ensure_future(read_into(news, each)) for each in sequences]
        open_ones, begun = len(sequences), set[int]()
        try:
            while open_ones:
                found = await news.get()
                if isinstance(found, Exception):
                    yield _event(protocol.error(str(found), "server_error"))
                    return
                sequence, pieces, last = found
                index = sequence.choice.index
                first = index not in begun
                if first:
                    begun.add(index)
                    pieces = _with_prefix(sequence, pieces)
                told = sequence.take_logprobs() if logprobs else None
                reason = sequence.told_reason if last else None
                yield _event(answer.part([answer.delta(index, pieces, reason, told, first)]))
                open_ones -= last
            if counted:
                yield _event(answer.part([], usage_of(sequences)))
            yield "data: [DONE]\n\n"
        finally:
            for reader in readers:
                reader.cancel()
            for each in sequences:
                each.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events. However it ends, also before its first event, nobody reads the sequences afterwards."""

    def __init__(self, events: AsyncIterator[str], sequences: Sequence[RunningAnswer]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._sequences = sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for each in self._sequences:
                each.cancel()


@dataclass(frozen=True, slots=True)
class _Begun:
    """A submitted request: its sequences, and how it is to be answered. ``counted``: a stream ends with its usage."""

    sequences: list[RunningAnswer]
    stream: bool
    counted: bool
    logprobs: bool
    response: ResponseAnswer | None = None


def _with_prefix(sequence: RunningAnswer, pieces: list[Piece]) -> list[Piece]:
    """Return the parts behind the prompt that is repeated."""
    prefix = sequence.choice.prefix
    return [Piece("text", prefix), *pieces] if prefix else pieces


def _cut(tokens: list[int], most: int | None) -> list[int]:
    """Return the last ``most`` tokens."""
    return tokens if most is None or len(tokens) <= most else tokens[-most:]


class _TooLargeError(ValueError):
    pass


class _ModelError(ValueError):
    """A request names another model."""


async def _until_gone(request: Request) -> None:
    """Until the client closes the connection. The body has been read."""
    with contextlib.suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


def _event(content: dict[str, Any], name: str | None = None) -> str:
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {json.dumps(content, ensure_ascii=False).translate(_LINE_ENDS)}\n\n"


def _unknown_model(problem: _ModelError) -> Response:
    return _refusal(404, str(problem), "invalid_request_error", "model", code="model_not_found")


def _no_response(id: str) -> Response:
    return _refusal(404, f"there is no response {id[:100]!r}, or no more", "invalid_request_error", "id")


def _unauthorized() -> Response:
    return _refusal(401, "the token in the header Authorization is missing or wrong", "authentication_error")


def _refusal(
    status: int,
    message: str,
    kind: str,
    field: str | None = None,
    *,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return JSONResponse(protocol.error(message, kind, field, code), status, headers=headers)
