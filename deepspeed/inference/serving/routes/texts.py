"""Routes that tokenize and detokenize, compatible with vLLM. Imported only if FastAPI is installed."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, SkipValidation

from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.bodies import RequestError, kind_of
from deepspeed.inference.serving.handling import Intake
from deepspeed.inference.serving.models import Models
from deepspeed.inference.serving.tokenizers import HuggingFaceTokenizer
from deepspeed.version import __version__


class TokenizeRequest(BaseModel):
    """``prompt`` or ``messages``. ``add_special_tokens``: default: only for a prompt, since templates add their own."""

    model: str = ""
    prompt: SkipValidation[str | None] = None
    messages: SkipValidation[list[dict[str, Any]] | None] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(BaseModel):
    model: str = ""
    tokens: SkipValidation[list[int]]


def add_text_routes(app: FastAPI, intake: Intake, models: Models) -> None:
    def tokenized(body: bytes, _: Any) -> dict[str, Any]:
        request = protocol.fields_as(TokenizeRequest, body)
        model, _ = models.find(request.model)
        tokens = _tokens_of(request, model.tokenizer)
        names = model.tokenizer.names(tokens) if request.return_token_strs else None
        counts = {"count": len(tokens), "max_model_len": model.max_length}
        return {**counts, "tokens": tokens, "token_strs": names}

    def detokenized(body: bytes, _: Any) -> dict[str, Any]:
        request = protocol.fields_as(DetokenizeRequest, body)
        model, _ = models.find(request.model)
        if not isinstance(request.tokens, list):
            raise RequestError(f"tokens: expected a list, not {kind_of(request.tokens)}", "tokens")
        protocol.check_tokens(request.tokens, "tokens")
        return {"prompt": model.tokenizer.decode_all(request.tokens)}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return JSONResponse(await intake.take(request, tokenized))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return JSONResponse(await intake.take(request, detokenized))

    @app.get("/tokenizer_info")
    async def info(request: Request) -> Response:
        intake.authorize(request)
        return JSONResponse(models.find(request.query_params.get("model", ""))[0].tokenizer.info())

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})


def _tokens_of(request: TokenizeRequest, tokenizer: HuggingFaceTokenizer) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("expected either prompt or messages", "prompt")
    if request.messages is not None:
        if request.add_special_tokens:
            raise RequestError("add_special_tokens: the chat template adds its own", "add_special_tokens")
        return tokenizer.chat(protocol.messages_of(request), protocol.template_of(request))
    if not isinstance(request.prompt, str):
        raise RequestError(f"prompt: expected a string, not {kind_of(request.prompt)}", "prompt")
    bare = request.add_special_tokens is False
    return tokenizer.words(request.prompt) if bare else tokenizer.encode(request.prompt)
