"""``/v1/embeddings``: the last hidden states of a causal model as one vector for each input. Imported only where
FastAPI is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, SkipValidation

from deepspeed.inference.scheduling.requests import SamplingParams
from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.bodies import RequestError
from deepspeed.inference.serving.handling import Intake, refusal_of
from deepspeed.inference.serving.models import Models
from deepspeed.inference.serving.pooling import check_dimensions, encoded, vector_of
from deepspeed.inference.serving.service import BusyError, ClosedError, Service, Update
from deepspeed.inference.serving.tokenizers import Tokenizer

_MOST_INPUTS = 2048
"""OpenAI's limit."""


class EmbeddingRequest(BaseModel):
    """OpenAI's fields. ``normalize``: to the length 1."""

    model: str = ""
    input: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool = True
    add_special_tokens: bool = True


def add_embedding_routes(
    app: FastAPI, service: Service, intake: Intake, models: Models, tokenizer: Tokenizer
) -> None:
    settings = intake.settings

    def begun(body: bytes, _: Any) -> tuple[EmbeddingRequest, list[list[int]], SamplingParams]:
        request: EmbeddingRequest = protocol.fields_as(EmbeddingRequest, body)
        params = SamplingParams(
            max_new_tokens=0, pooling=settings.pooling, adapter=models.find(request.model)
        )
        check_dimensions(request.dimensions, settings.dimensions)
        given = protocol.texts_of(request.input, "input")
        if len(given) > _MOST_INPUTS:
            raise RequestError(f"input: at most {_MOST_INPUTS:,} are computed in one request", "input")
        encode = tokenizer.encode if request.add_special_tokens else tokenizer.words
        inputs = [encode(each) if isinstance(each, str) else each for each in given]
        for place, tokens in enumerate(inputs):  # all before the first is computed
            try:
                service.engine.check(tokens, params)
            except ValueError as problem:
                raise RequestError(f"input.{place}: {problem}", f"input.{place}") from None
        return request, inputs, params

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        found = await intake.take(request, begun)
        if isinstance(found, Response):
            return found
        asked, inputs, params = found
        try:
            vectors = [
                vector_of(pooled, asked.dimensions, asked.normalize)
                for pooled in await _pooled(service, inputs, params)
            ]
        except (ValueError, BusyError, ClosedError) as problem:
            return refusal_of(problem)
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(each, asked.encoding_format)}
            for index, each in enumerate(vectors)
        ]
        count = sum(map(len, inputs))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse(
            {"object": "list", "model": asked.model or models.name, "data": data, "usage": usage}
        )


async def _pooled(service: Service, inputs: Sequence[Sequence[int]], params: SamplingParams) -> list[Any]:
    """Return the vectors of ``inputs``. A request of many takes at most a quarter of the places that the service has.
    BusyError: there is no place, and none of this request will become free."""
    loop, updates = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Update]]()
    tickets: dict[int, Any] = {}
    vectors: list[Any] = [None] * len(inputs)
    following = 0

    def submit(index: int) -> None:
        def listen(update: Update) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, (index, update))

        tickets[index] = service.submit(inputs[index], params, listen)

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
