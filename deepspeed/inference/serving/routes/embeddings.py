"""``/v1/embeddings``: one pooled hidden-state vector per input. Imported only if FastAPI is installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field, SkipValidation
from torch import Tensor

from deepspeed.inference.scheduling.requests import NotFiniteError, SamplingParams
from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.bodies import RequestError
from deepspeed.inference.serving.handling import Intake, refusal_of, unless_disconnected
from deepspeed.inference.serving.models import Models
from deepspeed.inference.serving.pooling import check_dimensions, encoded, vectors_of
from deepspeed.inference.serving.service import BusyError, ClosedError, Update

MAX_INPUTS = 2048
"""OpenAI's limit."""

_ENCODED_TOGETHER = 16
"""Number of vectors encoded per call on a worker thread, which runs to its end even if the client disconnects."""


class EmbeddingRequest(BaseModel):
    """OpenAI's fields. ``normalize``: to the length 1. ``truncate_prompt_tokens``: see ``Embedder.tokens_of``."""

    model: str = ""
    input: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: protocol.Truncation = None
    priority: protocol.Priority = 0


class Embedder:
    """Computes the vectors of a request's inputs. ``asked`` has the fields ``model`` and ``priority``. ModelError:
    unknown model."""

    def __init__(self, models: Models, asked: Any) -> None:
        self.model, adapter = models.find(asked.model)
        self.name = asked.model or self.model.name
        pooling, priority = self.model.pooling, asked.priority
        self._params = SamplingParams(max_new_tokens=0, pooling=pooling, adapter=adapter, priority=priority)

    def tokens_of(self, given: str | list[int], most: int | None, *, specials: bool = True) -> list[int]:
        """Return the tokens of an input, cut to its last ones, at most ``most`` (-1: as many as the model takes), of
        which a text's special tokens are some. RequestError: there is no room for others."""
        most = self.model.max_length if most == -1 else most
        if not isinstance(given, str):
            return protocol.last_of(given, most)
        tokenizer = self.model.tokenizer
        whole = tokenizer.encode(given) if specials else tokenizer.words(given)
        cut = len(whole) - (most or len(whole))
        if cut <= 0:
            return whole
        words = tokenizer.words(given) if specials else whole
        if cut >= len(words):
            least = len(whole) - len(words) + 1
            where = "truncate_prompt_tokens"
            raise RequestError(f"{where}={most}: at least {least} is expected, with special tokens", where)
        places = range(len(whole) - len(words) + 1)
        begin = next((at for at in places if whole[at : at + len(words)] == words), 0)
        return whole[:begin] + whole[begin + cut :]

    def check(self, inputs: Sequence[Sequence[int]], name: str) -> None:
        """Check all inputs before any is computed. RequestError: too many, or one cannot be computed."""
        if len(inputs) > MAX_INPUTS:
            raise RequestError(f"{name}: at most {MAX_INPUTS:,} inputs per request", name)
        for place, tokens in enumerate(inputs):
            try:
                self.model.service.engine.check(tokens, self._params)
            except ValueError as problem:
                raise RequestError(f"{name}.{place}: {problem}", f"{name}.{place}") from None

    async def pooled(self, inputs: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the vectors of ``inputs``. A request with many inputs uses at most a quarter of the service's
        capacity. BusyError: the service is full, and none of its slots belongs to this request."""
        service = self.model.service
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Update]]()
        tickets: dict[int, Any] = {}
        vectors: list[Any] = [None] * len(inputs)
        following = 0

        def submit(index: int) -> None:
            def listen(update: Update) -> None:
                loop.call_soon_threadsafe(updates.put_nowait, (index, update))

            tickets[index] = service.submit(inputs[index], self._params, listen)

        try:
            while following < len(inputs) or tickets:
                while following < len(inputs) and len(tickets) < max(1, service.max_requests // 4):
                    try:
                        submit(following)
                    except BusyError:
                        if not tickets:
                            raise
                        break
                    following += 1
                index, update = await updates.get()
                if update.error is not None:
                    raise update.error
                vectors[index] = update.pooled
                service.cancel(tickets.pop(index), update.reason or "stop")
        finally:
            for ticket in tickets.values():
                service.cancel(ticket)
        return vectors


async def answered(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the result of ``work``, or an error response."""
    try:
        return await unless_disconnected(request, work)
    except (ValueError, BusyError, ClosedError, NotFiniteError) as problem:
        return refusal_of(problem)


def add_embedding_routes(app: FastAPI, intake: Intake, models: Models) -> None:
    def begun(body: bytes, _: Any) -> tuple[EmbeddingRequest, list[list[int]], Embedder]:
        request: EmbeddingRequest = protocol.fields_as(EmbeddingRequest, body)
        embedder = Embedder(models, request)
        model = embedder.model
        if model.encode_pair is not None:
            raise RequestError("the model scores pairs of texts and has no embeddings")
        check_dimensions(request.dimensions, model.dimensions)
        given = protocol.texts_of(request.input, "input")
        most, specials = request.truncate_prompt_tokens, request.add_special_tokens
        inputs = [embedder.tokens_of(each, most, specials=specials) for each in given[: MAX_INPUTS + 1]]
        embedder.check(inputs, "input")
        return request, inputs, embedder

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        asked, inputs, embedder = await intake.take(request, begun)

        async def answer() -> Response:
            pooled = await embedder.pooled(inputs)
            data, count = await _encoded(pooled, asked), sum(map(len, inputs))
            usage = {"prompt_tokens": count, "total_tokens": count}
            return _listed(data, embedder.name, usage)

        return await answered(request, answer())


async def _encoded(pooled: Sequence[Tensor], asked: EmbeddingRequest) -> list[bytes]:
    """Return the entries of a response, encoded on worker threads: thousands of vectors take seconds. Each call of the
    JSON encoder gets one vector, since other threads do not run meanwhile."""
    vectors = await asyncio.to_thread(vectors_of, pooled, asked.dimensions, asked.normalize)

    def some(start: int) -> list[bytes]:
        return [
            encoded(vector, index, asked.encoding_format)
            for index, vector in enumerate(vectors[start : start + _ENCODED_TOGETHER], start)
        ]

    made: list[bytes] = []
    for start in range(0, len(vectors), _ENCODED_TOGETHER):
        made += await asyncio.to_thread(some, start)
    return made


def _listed(data: Sequence[bytes], model: str, usage: dict[str, int]) -> Response:
    """Return a response with the entries ``data``, sent as fast as the client reads: they may be 200 MB."""
    head = json.dumps({"object": "list", "model": model, "usage": usage})[:-1].encode() + b', "data": ['
    size = len(head) + sum(map(len, data)) + 2 * len(data)  # two bytes after each entry

    async def parts() -> AsyncIterator[bytes]:
        yield head
        for index, entry in enumerate(data, 1):
            yield entry + (b", " if index < len(data) else b"]}")

    return StreamingResponse(parts(), media_type="application/json", headers={"Content-Length": str(size)})
