"""The HTTP server: OpenAI's completions and chats, health and metrics. Imported only if FastAPI is installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deepspeed.inference.scheduling.requests import NotFiniteError
from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.clients import REQUEST_ID
from deepspeed.inference.serving.handling import (
    Intake,
    Refused,
    ServerSettings,
    refusal,
    refusal_of,
    unless_disconnected,
)
from deepspeed.inference.serving.models import ModelError, Models, ServedModel
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
from deepspeed.inference.serving.routes.adapters import add_adapter_routes
from deepspeed.inference.serving.routes.embeddings import add_embedding_routes
from deepspeed.inference.serving.routes.scores import add_score_routes
from deepspeed.inference.serving.routes.texts import add_text_routes
from deepspeed.inference.serving.sampling_fields import sampling_of
from deepspeed.inference.serving.sequences import ECHOED, RunningAnswer, read_all, read_into, usage_of
from deepspeed.inference.serving.service import ClosedError, Service, Services
from deepspeed.inference.serving.text import TextStream
from deepspeed.inference.serving.tool_requests import AnswerForm, answer_form, tools_of
from deepspeed.observe.live.access import names_this_machine
from deepspeed.observe.live.server import policy_of

_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""Many clients split events at all line ends of Python's ``splitlines``; JSON does not require escaping these three."""

_END = 24
"""Number of last prompt tokens in which to look for the start or end of reasoning."""


def make_app(models: Models, settings: ServerSettings) -> FastAPI:
    """Create the application. The caller starts and closes ``models.services``."""
    app = FastAPI(title="deepspeed", docs_url=None, redoc_url=None, openapi_url=None)
    intake = Intake(settings, models.services)
    server = _Server(intake, models)
    _add_middleware(app, settings)

    _add_health_routes(app, models)

    @app.get("/v1/models")
    @app.get("/v1/models/")  # not a model without a name
    async def listed(request: Request) -> Response:
        intake.authorize(request)
        return JSONResponse({"object": "list", "data": models.described()})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        intake.authorize(request)
        return JSONResponse(models.one(name))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await server.answer(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chats(request: Request) -> Response:
        return await server.answer(request, ChatRequest)

    _add_response_routes(app, intake, server)
    add_adapter_routes(app, intake, models)
    add_embedding_routes(app, intake, models)
    add_score_routes(app, intake, models)
    add_text_routes(app, intake, models)
    if any(each["type"] in ("chat", "language") for each in models.described()):
        _add_page(app)

    @app.exception_handler(Refused)
    async def refused(_: Request, problem: Refused) -> Response:
        return problem.response

    @app.exception_handler(ModelError)
    async def no_model(_: Request, problem: ModelError) -> Response:
        return refusal_of(problem)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, problem: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {problem.detail}"
        return refusal(problem.status_code, message, "invalid_request_error", headers=problem.headers)

    return app


def _add_health_routes(app: FastAPI, models: Models) -> None:
    """Add the routes; ``?model=name`` selects one model, otherwise they cover all."""

    def condition(request: Request, is_good: Callable[[Service | Services], bool]) -> Response:
        name = request.query_params.get("model")
        asked = models.services if name is None else models.find(name)[0].service
        good, why = is_good(asked), {} if asked.failure is None else {"error": str(asked.failure)}
        return JSONResponse({"status": "ok" if good else "unavailable", **why}, 200 if good else 503)

    @app.get("/health")
    async def health(request: Request) -> Response:
        return condition(request, lambda asked: asked.failure is None)

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        return condition(request, lambda asked: asked.healthy)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(models.services.metrics(), media_type="text/plain; version=0.0.4")


def _add_middleware(app: FastAPI, settings: ServerSettings) -> None:
    if not settings.all_keys:
        app.add_middleware(_ThisMachineOnly)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )


def _add_page(app: FastAPI) -> None:
    """Serve the page to try the models. It has no secrets: the user enters the token there, and only then sees the
    names of models."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy_of(text),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(text, headers=headers)


def _add_response_routes(app: FastAPI, intake: Intake, server: _Server) -> None:
    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await server.answer(request, ResponsesRequest)

    @app.get("/v1/responses/{id}")
    async def response(request: Request, id: str) -> Response:
        intake.authorize(request)
        found = server.store.get(id)
        return _no_response(id) if found is None else Response(found.response, media_type="application/json")

    @app.delete("/v1/responses/{id}")
    async def forget(request: Request, id: str) -> Response:
        intake.authorize(request)
        if not server.store.delete(id):
            return _no_response(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})


def endpoints(app: FastAPI) -> list[str]:
    """Return the paths without parameters."""
    paths = [getattr(route, "path", "{") for route in app.routes]
    return [path for path in paths if "{" not in path]


class _ThisMachineOnly:
    """Middleware of a server without a token, which rejects requests to other host names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and not names_this_machine(Headers(scope=scope).get("host", "")):
            message = "local requests only, but the Host header names another machine: start the server with a token"
            answer = refusal(403, message, "permission_error")
        await answer(scope, receive, send)


@dataclass(eq=False)
class _Server:
    intake: Intake
    models: Models
    store: ResponseStore = field(default_factory=ResponseStore)

    async def answer(self, request: Request, kind: Any) -> Response:
        begun = await self.intake.take(request, partial(self._begin, kind))
        if begun.streams:
            return _EventStream(begun.events(), begun.sequences)
        try:
            answers = await unless_disconnected(request, read_all(begun.sequences))
        except (ClosedError, NotFiniteError) as problem:
            return refusal_of(problem)
        finally:
            for each in begun.sequences:
                each.cancel()
        return JSONResponse(await begun.whole(answers))

    def _begin(self, kind: Any, body: bytes, loop: asyncio.AbstractEventLoop) -> _Completion | _Response:
        """Parse, tokenize and submit, on a worker thread; updates arrive on ``loop``."""
        request = protocol.parse(kind, body)
        model, adapter = self.models.find(request.model)
        if model.no_text:
            raise RequestError(model.no_text, "model")
        response, name = None, request.model or model.name
        if isinstance(request, ResponsesRequest):
            given = request
            request, messages = chat_of(given, self.store)
            response = ResponseAnswer(given, name, messages)
        choices, form = _choices(model, request, adapter)
        sequences = _submit(model, choices, request, loop, form)
        if response is not None:
            return _Response(sequences, request.stream, response, self.store)
        answer, counts = Answer(kind is ChatRequest, name), request.stream_options or {}
        return _Completion(sequences, request.stream, answer, protocol.wants_logprobs(request), counts)


@dataclass(frozen=True, slots=True)
class _Completion:
    """A submitted completion or chat. ``counts``: the options of usage in a stream."""

    sequences: list[RunningAnswer]
    streams: bool
    answer: Answer
    logprobs: bool
    counts: Mapping[str, Any]

    async def whole(self, answers: Sequence[list[Piece]]) -> dict[str, Any]:
        """Return the content of the response, given the whole answers."""
        choices = [
            self.answer.choice(
                each.choice.index,
                _with_prefix(each, pieces),
                each.finish_reason,
                each.logprobs if self.logprobs else None,
            )
            for each, pieces in zip(self.sequences, answers, strict=True)
        ]
        return self.answer.content(choices, usage=usage_of(self.sequences))

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream. A client that leaves closes this iterator."""
        sequences, answer, counts = self.sequences, self.answer, self.counts
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
                entries = sequence.take_logprobs() if self.logprobs else None
                reason = sequence.finish_reason if last else None
                usage = usage_of(sequences) if counts.get("continuous_usage_stats") else None
                more = {"usage": usage} if counts.get("include_usage") else {}
                delta = answer.delta(index, pieces, reason, entries, first)
                yield _event(answer.content([delta], is_event=True, **more))
                open_ones -= last
            if counts.get("include_usage"):
                yield _event(answer.content([], is_event=True, usage=usage_of(sequences)))
            yield "data: [DONE]\n\n"
        finally:
            for reader in readers:
                reader.cancel()


@dataclass(frozen=True, slots=True)
class _Response:
    """A submitted request for a response, which has one answer."""

    sequences: list[RunningAnswer]
    streams: bool
    response: ResponseAnswer
    store: ResponseStore

    async def whole(self, answers: Sequence[list[Piece]]) -> dict[str, Any]:
        """Return the content of the response, given its whole answer."""
        self.response.add(answers[0])
        await self._end()
        return self.response.response

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        response = self.response
        try:
            for event in response.begin():
                yield _event(event, event["type"])
            async for pieces, _ in self.sequences[0].read():
                for event in response.add(pieces):
                    yield _event(event, event["type"])
            for event in await self._end():
                yield _event(event, event["type"])
        except (ClosedError, NotFiniteError) as problem:
            yield _event(response.fail(str(problem)), "response.failed")

    async def _end(self) -> list[dict[str, Any]]:
        """Store a response before its client learns of its end. Returns the last events."""
        response, (sequence,) = self.response, self.sequences
        usage = usage_of_response(usage_of(self.sequences), sequence.reasoning_tokens)
        events = response.end(sequence.finish_reason, usage)
        if response.is_kept:
            await asyncio.to_thread(self.store.put, response.response, response.messages)
        return events


def _choices(model: ServedModel, request: Any, adapter: Any) -> tuple[list[Choice], AnswerForm | None]:
    made, form = [], None
    if isinstance(request, ChatRequest):
        _check_count(model.service, 1, request.n)
        tokens, form = _chat(model, request)
        prompts = iter([("", _cut(tokens, request, model))])
    else:
        given = protocol.texts_of(request.prompt, "prompt")
        _check_count(model.service, len(given), request.n)
        # One by one: those after the first that does not fit are not tokenized.
        prompts = (_tokens(model, each, request) for each in given)
    shared = {**sampling_of(request, model.tokenizer.words), "adapter": adapter}
    if form is not None:
        shared["constraint"] = form.constraint(shared["constraint"], model.special_ids)
    for prefix, tokens in prompts:
        for index in range(request.n):
            params = protocol.params_of(request, index, len(tokens), model, shared)
            made.append(Choice(len(made), tokens, params, prefix))
    return made, form


def _chat(model: ServedModel, request: ChatRequest) -> tuple[list[int], AnswerForm]:
    """Return the tokens of a chat, and how to parse its answers."""
    use, own = tools_of(request), protocol.own_template_of(request, model.trust_templates)
    arguments = {
        **protocol.template_of(request),
        **protocol.effort_of(request, request.chat_template or model.tokenizer.template),
        **own,
        **({"tools": list(use.given)} if use.given else {}),
    }
    messages = protocol.messages_of(request)
    begun = messages[-1]["content"] if arguments.get("continue_final_message") else ""
    tokens = model.tokenizer.chat(messages, arguments)
    specials, known = list(model.special_ids), model.tokenizer.specials
    end = "".join(known.get(token) or model.tokenizer.decode([token]) for token in tokens[-_END:])
    return tokens, answer_form(model.formats, use, end, specials, begun)


def _check_count(service: Service, prompts: int, n: int) -> None:
    """Check the number of sequences. RequestError: more than are ever served at once."""
    most = service.max_requests
    if prompts * n > most:
        raise RequestError(
            f"prompts: {prompts}, n: {n}; their product must be at most {most}, the number of concurrent "
            "sequences (--max-requests)",
            "n" if prompts <= most else "prompt",
        )


def _tokens(model: ServedModel, prompt: str | list[int], request: CompletionRequest) -> tuple[str, list[int]]:
    """Return the text to repeat, and the tokens."""
    encode = model.tokenizer.encode if request.add_special_tokens else model.tokenizer.words
    whole = encode(prompt) if isinstance(prompt, str) else prompt
    if not whole:
        raise RequestError("the prompt is empty", "prompt")
    tokens = _cut(whole, request, model)
    if not request.echo:
        return "", tokens
    if isinstance(prompt, str) and tokens is whole:
        return prompt, tokens
    return model.tokenizer.decode(tokens), tokens


def _submit(
    model: ServedModel,
    choices: Sequence[Choice],
    request: Any,
    loop: asyncio.AbstractEventLoop,
    form: AnswerForm | None,
) -> list[RunningAnswer]:
    """Submit all sequences, or none."""
    model.service.check_room(len(choices))
    made, stops, ids = [], protocol.stops_of(request), model.special_ids
    marked = () if form is None else form.markers
    shown = {ids[mark] for mark in (marked if request.skip_special_tokens else ids) if mark in ids}
    try:
        for choice in choices:
            before = choice.prompt[-ECHOED:] if choice.prefix else ()
            text = TextStream(
                model.tokenizer.decode,
                stops,
                specials=model.tokenizer.specials,
                before=before,
                include_stop=request.include_stop_str_in_output,
                shown=shown,
            )
            parser = None if form is None else form.parser()
            made.append(RunningAnswer(model.service, choice, text, loop, parser))
    except BaseException:
        for each in made:
            each.cancel()
        raise
    return made


class _EventStream(StreamingResponse):
    """Server-sent events. However the stream ends, even before its first event, its sequences are cancelled."""

    def __init__(self, events: AsyncIterator[str], sequences: Sequence[RunningAnswer]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._sequences = sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for each in self._sequences:
                each.cancel()


def _with_prefix(sequence: RunningAnswer, pieces: list[Piece]) -> list[Piece]:
    """Return the parts of an answer, after the echoed prompt."""
    prefix = sequence.choice.prefix
    return [Piece("text", prefix), *pieces] if prefix else pieces


def _cut(tokens: list[int], request: Any, model: ServedModel) -> list[int]:
    """Return the last tokens of a prompt: as many as are asked for, or as leave room for the answer."""
    most = request.truncate_prompt_tokens
    if most == -1:
        asked = protocol.asked_tokens(request)
        most = max(1, model.max_length - (1 if asked is None else asked))
    return protocol.last_of(tokens, most)


def _event(content: dict[str, Any], name: str | None = None) -> str:
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {json.dumps(content, ensure_ascii=False).translate(_LINE_ENDS)}\n\n"


def _no_response(id: str) -> Response:
    return refusal(404, f"there is no response {id[:100]!r}, or it expired", "invalid_request_error", "id")
