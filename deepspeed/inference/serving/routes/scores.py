"""``/v1/score`` and ``/v1/rerank``: similarity of texts, by a cross-encoder or as the cosine of the vectors of
``/v1/embeddings``. Fields and responses are compatible with vLLM, and with Jina for reranking. Imported only if FastAPI
is installed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, SkipValidation
from torch import Tensor

from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.bodies import RequestError
from deepspeed.inference.serving.handling import Intake
from deepspeed.inference.serving.models import Models
from deepspeed.inference.serving.pooling import vectors_of
from deepspeed.inference.serving.routes.embeddings import MAX_INPUTS, Embedder, answered


class _TextPairs(BaseModel):
    model: str = ""
    truncate_prompt_tokens: protocol.Truncation = None
    priority: protocol.Priority = 0

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return the texts of both sides, equally many. RequestError: there are none, or they are not texts."""
        raise NotImplementedError

    def answer_of(self, scores: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
        """Return the response body for the ``scores`` of the right side's ``texts``."""
        raise NotImplementedError


class ScoreRequest(_TextPairs):
    """One text with each of a list, or two lists of equal length in pairs."""

    text_1: SkipValidation[str | list[str]]
    text_2: SkipValidation[str | list[str]]

    def pairs(self) -> tuple[list[str], list[str]]:
        left, right = _texts(self.text_1, "text_1"), _texts(self.text_2, "text_2")
        if len(left) not in (1, len(right)):
            raise RequestError(
                f"text_1 has {len(left)} texts and text_2 {len(right)}: expected one, or as many",
                "text_1",
            )
        return left * (len(right) // len(left)), right

    def answer_of(self, scores: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
        data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "data": data,
        }


class RerankRequest(_TextPairs):
    """``top_n``: return only this many best; 0: all. Documents are texts, or objects with a field ``text``."""

    query: SkipValidation[str]
    documents: SkipValidation[list[str] | list[dict[str, str]]]
    top_n: int = Field(default=0, ge=0)
    return_documents: bool = True

    def pairs(self) -> tuple[list[str], list[str]]:
        if not isinstance(self.query, str) or not isinstance(self.documents, list):
            raise RequestError("query: expected a string, and a list of strings as documents", "query")
        texts = [each.get("text") if isinstance(each, dict) else each for each in self.documents]
        documents = _texts(texts, "documents")
        return _texts(self.query, "query") * len(documents), documents

    def answer_of(self, scores: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: self.top_n or None]
        document = (lambda at: {"document": {"text": texts[at]}}) if self.return_documents else lambda _: {}
        results = [{"index": at, **document(at), "relevance_score": scores[at]} for at in order]
        return {"id": f"rerank-{uuid.uuid4().hex}", "results": results}


def add_score_routes(app: FastAPI, intake: Intake, models: Models) -> None:
    def begun(kind: type[_TextPairs], body: bytes, _: Any) -> tuple[Any, ...]:
        asked = protocol.fields_as(kind, body)
        left, right = asked.pairs()
        if len(right) > MAX_INPUTS:
            raise RequestError(f"{len(right):,} pairs of texts: at most {MAX_INPUTS:,} per request")
        embedder = Embedder(models, asked)
        encode_pair, most = embedder.model.encode_pair, asked.truncate_prompt_tokens
        if encode_pair is not None:
            most = embedder.model.max_length if most == -1 else most
            inputs = [encode_pair(*pair, most) for pair in zip(left, right, strict=True)]
            embedder.check(inputs, "pairs")
            return asked, right, inputs, embedder, _scores
        texts = list(dict.fromkeys([*left, *right]))
        inputs = [embedder.tokens_of(each, most) for each in texts[: MAX_INPUTS + 1]]
        embedder.check(inputs, "texts")
        return asked, right, inputs, embedder, partial(_cosines, texts=texts, left=left, right=right)

    async def answer(request: Request, kind: type[_TextPairs]) -> Response:
        asked, right, inputs, embedder, scores_of = await intake.take(request, partial(begun, kind))

        async def compared() -> Response:
            pooled = await embedder.pooled(inputs)
            fields = asked.answer_of(await asyncio.to_thread(scores_of, pooled), right)
            count = sum(map(len, inputs))
            usage = {"prompt_tokens": count, "total_tokens": count}
            return JSONResponse({"model": embedder.name, "usage": usage, **fields})

        return await answered(request, compared())

    for path in ("/score", "/v1/score"):
        app.post(path)(_route(answer, ScoreRequest))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path)(_route(answer, RerankRequest))


def _scores(pooled: Sequence[Tensor]) -> list[float]:
    """Return the score of each pair from a cross-encoder. NotFiniteError: see ``vectors_of``."""
    return vectors_of([each[None] for each in pooled], None, False)[:, 0].tolist()


def _cosines(
    pooled: Sequence[Tensor], texts: Sequence[str], left: Sequence[str], right: Sequence[str]
) -> list[float]:
    """Return the cosine of each pair of ``left`` and ``right``. ``pooled``: the vectors of ``texts``."""
    vectors = vectors_of(pooled, None, True)
    place = {text: at for at, text in enumerate(texts)}
    first, second = (vectors[[place[each] for each in side]] for side in (left, right))
    return (first * second).sum(1).tolist()


def _route(answer: Callable[..., Any], kind: type[_TextPairs]) -> Callable[..., Any]:
    async def route(request: Request) -> Response:
        return await answer(request, kind)

    return route


def _texts(given: Any, name: str) -> list[str]:
    """Return a list of texts. RequestError: it is empty, or has something else."""
    found: Any = protocol.texts_of(given, name)
    if not isinstance(found[0], str):
        raise RequestError(f"{name}: expected strings", name)
    return found
