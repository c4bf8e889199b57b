"""The HTTP server: OpenAI's completions and chats, health and metrics. Imported only where FastAPI is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from deepspeed.inference.scheduling.requests import TokenLogprob
from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.adapter_routes import add_adapter_routes
from deepspeed.inference.serving.embedding_routes import add_embedding_routes
from deepspeed.inference.serving.handling import Intake, ServerSettings, refusal, refusal_of, unauthorized
from deepspeed.inference.serving.models import ModelError, Models
from deepspeed.inference.serving.protocol import (
    Answer,
    ChatRequest,
    Choice,
    CompletionRequest,
    RequestError,
    TextLogprob,
)
from deepspeed.inference.serving.sampling_fields import sampling_of
from deepspeed.inference.serving.service import ClosedError, Service, Ticket, Update
from deepspeed.inference.serving.text import TextStream
from deepspeed.inference.serving.text_routes import add_text_routes
from deepspeed.inference.serving.tokenizers import Tokenizer
from deepspeed.observe.live.access import names_this_machine

_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""Many clients split events where Python's ``splitlines`` does; JSON lets these three stand in a text as they are."""

_ECHOED = 8  # tokens of a prompt that the answer's first token is decoded with


def make_app(
    service: Service, tokenizer: Tokenizer, settings: ServerSettings, models: Models | None = None
) -> FastAPI:
    """The application; whoever runs it starts and closes ``service``. ``models``: with its adapters, if there are
    any."""
    app = FastAPI(title="deepspeed", docs_url=None, redoc_url=None, openapi_url=None)
    intake, models = Intake(settings), models or Models(settings.model, settings.max_length)
    server = _Server(service, tokenizer, settings, intake, models)
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
            service.metrics.text(service.state(), settings.model), media_type="text/plain; version=0.0.4"
        )

    @app.get("/v1/models")
    async def listed(request: Request) -> Response:
        if not intake.authorize(request):
            return unauthorized()
        return JSONResponse({"object": "list", "data": models.described()})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if not intake.authorize(request):
            return unauthorized()
        try:
            return JSONResponse(models.one(name))
        except ModelError as problem:
            return refusal_of(problem)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await server.answer(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chats(request: Request) -> Response:
        return await server.answer(request, ChatRequest)

    add_adapter_routes(app, intake, models)
    add_embedding_routes(app, service, intake, models, tokenizer)
    add_text_routes(app, intake, models, tokenizer, settings.max_length)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, problem: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {problem.detail}"
        return refusal(problem.status_code, message, "invalid_request_error", headers=problem.headers)

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
            answer = refusal(403, message, "permission_error")
        await answer(scope, receive, send)


class _Server:
    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        intake: Intake,
        models: Models,
    ) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.settings = settings
        self.intake = intake
        self.models = models

    async def answer(self, request: Request, kind: Any) -> Response:
        begun = await self.intake.take(request, partial(self._begin, kind))
        if isinstance(begun, Response):
            return begun
        answer = Answer(kind is ChatRequest, begun.model)
        if begun.stream:
            events = self._events(answer, begun.sequences, begun.logprobs, begun.counted)
            return _EventStream(events, begun.sequences)
        return await self._whole(request, answer, begun.sequences, begun.logprobs)

    def _begin(self, kind: Any, body: bytes, loop: asyncio.AbstractEventLoop) -> _Begun:
        """Parse, tokenize and submit, on a thread beside ``loop``, where the updates arrive."""
        return self._submitted(protocol.parse(kind, body), loop)

    def _submitted(self, request: Any, loop: asyncio.AbstractEventLoop) -> _Begun:
        adapter = self.models.find(request.model)
        sequences = self._submit(self._choices(request, adapter), request, loop)
        counted = bool((request.stream_options or {}).get("include_usage"))
        model = request.model or self.models.name
        return _Begun(sequences, request.stream, counted, protocol.wants_logprobs(request), model)

    def _choices(self, request: Any, adapter: Any) -> list[Choice]:
        settings, made = self.settings, []
        if isinstance(request, ChatRequest):
            self._check_count(1, request.n)
            arguments = protocol.template_of(request)
            tokens = self.tokenizer.chat(protocol.messages_of(request), arguments)
            prompts = iter([("", _cut(tokens, request.truncate_prompt_tokens))])
        else:
            given = protocol.prompts_of(request)
            self._check_count(len(given), request.n)
            # One by one: those after the first that does not fit are not tokenized.
            prompts = (self._tokens(each, request) for each in given)
        shared = {**sampling_of(request, self.tokenizer.words), "adapter": adapter}
        for prefix, tokens in prompts:
            room = settings.max_length - len(tokens)
            for index in range(request.n):
                params = protocol.params_of(
                    request, index, room, settings.default_tokens, settings.stop_token_ids, shared
                )
                made.append(Choice(len(made), tokens, params, prefix))
        return made

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
        self, choices: Sequence[Choice], request: Any, loop: asyncio.AbstractEventLoop
    ) -> list[_Sequence]:
        """All or none."""
        self.service.check_room(len(choices))
        made, stops = [], protocol.stops_of(request)
        try:
            for choice in choices:
                before = choice.prompt[-_ECHOED:] if choice.prefix else ()
                text = TextStream(
                    self.tokenizer.decode,
                    stops,
                    specials=self.tokenizer.specials,
                    before=before,
                    include_stop=request.include_stop_str_in_output,
                )
                made.append(_Sequence(self.service, choice, text, loop))
        except BaseException:
            for each in made:
                each.cancel()
            raise
        return made

    async def _whole(
        self, request: Request, answer: Answer, sequences: Sequence[_Sequence], logprobs: bool
    ) -> Response:
        finished = asyncio.ensure_future(_read_all(sequences))
        gone = asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                return Response(status_code=499)  # nobody reads it
            texts = finished.result()
        except ClosedError as problem:
            return refusal(503, str(problem), "server_error")
        finally:
            gone.cancel()
            finished.cancel()
            for each in sequences:
                each.cancel()
        choices = [
            answer.choice(
                each.choice.index, each.choice.prefix + text, each.reason, each.logprobs if logprobs else None
            )
            for each, text in zip(sequences, texts, strict=True)
        ]
        return JSONResponse(answer.whole(choices, _usage(sequences)))

    async def _events(
        self, answer: Answer, sequences: Sequence[_Sequence], logprobs: bool, counted: bool
    ) -> AsyncIterator[str]:
        """A client that leaves closes this iterator, and its sequences are cancelled."""
        news: asyncio.Queue[tuple[_Sequence, str, bool] | Exception] = asyncio.Queue()
        readers = [asyncio.ensure_future(_read_into(news, each)) for each in sequences]
        open_ones, begun = len(sequences), set[int]()
        try:
            while open_ones:
                found = await news.get()
                if isinstance(found, Exception):
                    yield _event(protocol.error(str(found), "server_error"))
                    return
                sequence, text, last = found
                index = sequence.choice.index
                first = index not in begun
                if first:
                    begun.add(index)
                    text = sequence.choice.prefix + text
                told = sequence.take_logprobs() if logprobs else None
                reason = sequence.reason if last else None
                yield _event(answer.part([answer.delta(index, text, reason, told, first)]))
                open_ones -= last
            if counted:
                yield _event(answer.part([], _usage(sequences)))
            yield "data: [DONE]\n\n"
        finally:
            for reader in readers:
                reader.cancel()
            for each in sequences:
                each.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events. However it ends, also before its first event, nobody reads the sequences afterwards."""

    def __init__(self, events: AsyncIterator[str], sequences: Sequence[_Sequence]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._sequences = sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for each in self._sequences:
                each.cancel()


class _Sequence:
    """One sequence of an answer: updates of the service's thread arrive on the event loop and become text."""

    def __init__(
        self, service: Service, choice: Choice, text: TextStream, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.choice = choice
        self.reason: str | None = None
        self.new_tokens = 0
        self.logprobs: list[TextLogprob] = []
        self._offset = 0  # of the next token's text
        self._service = service
        self._text = text
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

        def listen(update: Update) -> None:
            loop.call_soon_threadsafe(self._updates.put_nowait, update)

        self._ticket: Ticket = service.submit(choice.prompt, choice.params, listen)

    async def read(self) -> AsyncIterator[tuple[str, bool]]:
        """Pieces of text, and whether it is the last. ClosedError: the service has ended or failed."""
        while self.reason is None:
            update = await self._updates.get()
            if update.error is not None:
                self.cancel(update.reason or "failed")
                raise update.error
            text = ""
            if update.prompt is not None:
                await asyncio.to_thread(self._note_prompt, update.prompt)  # a second for a long one
            if update.token is not None:
                self.new_tokens += 1
                if update.logprob is not None:
                    self._note(update.logprob)
                stops = update.token in self.choice.params.stop_token_ids
                text = "" if stops else self._text.add(update.token)
            if self._text.stopped:
                self.reason = "stop"
            elif update.reason is not None:
                text += self._text.finish()
                self.reason = "stop" if self._text.stopped else protocol.REASONS.get(update.reason, "stop")
            if self.reason is not None:
                self.cancel(self.reason)
            if text or self.reason is not None:
                yield text, self.reason is not None

    def _note(self, found: TokenLogprob, before: Sequence[int] | None = None) -> None:
        text, *others = self._text.texts_of([found.token, *(token for token, _ in found.top)], before)
        top: dict[str, float] = {}
        for other, (_, value) in zip(others, found.top, strict=True):
            top.setdefault(other, value)  # of tokens with one text the likeliest
        if top:
            top.setdefault(text, found.value)
        self.logprobs.append(TextLogprob(text, found.value, top, self._offset))
        self._offset += len(text)

    def _note_prompt(self, found: Sequence[TokenLogprob]) -> None:
        """Add those of a prompt that is repeated, whose first token nothing predicts."""
        prompt = self.choice.prompt
        (first,) = self._text.texts_of(prompt[:1], ())
        self.logprobs.append(TextLogprob(first, None))
        self._offset = len(first)
        for place, each in enumerate(found, 1):
            self._note(each, prompt[max(0, place - _ECHOED) : place])

    async def read_all(self) -> str:
        return "".join([text async for text, _ in self.read()])

    def take_logprobs(self) -> list[TextLogprob]:
        """Those since the last call."""
        taken, self.logprobs = self.logprobs, []
        return taken

    def cancel(self, reason: str = "cancelled") -> None:
        """The first call's reason is counted."""
        self._service.cancel(self._ticket, reason)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A submitted request: its sequences, and how it is to be answered. ``counted``: a stream ends with its usage."""

    sequences: list[_Sequence]
    stream: bool
    counted: bool
    logprobs: bool
    model: str


def _cut(tokens: list[int], most: int | None) -> list[int]:
    """Return the last ``most`` tokens."""
    return tokens if most is None or len(tokens) <= most else tokens[-most:]


async def _read_all(sequences: Sequence[_Sequence]) -> list[str]:
    return await asyncio.gather(*(each.read_all() for each in sequences))


async def _read_into(news: asyncio.Queue[Any], sequence: _Sequence) -> None:
    try:
        async for text, last in sequence.read():
            news.put_nowait((sequence, text, last))
    except Exception as problem:
        news.put_nowait(problem)


async def _until_gone(request: Request) -> None:
    """Until the client closes the connection. The body has been read."""
    with contextlib.suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


def _usage(sequences: Sequence[_Sequence]) -> dict[str, int]:
    prompts = {id(each.choice.prompt): len(each.choice.prompt) for each in sequences}
    return protocol.usage(sum(prompts.values()), sum(each.new_tokens for each in sequences))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False).translate(_LINE_ENDS)}\n\n"
