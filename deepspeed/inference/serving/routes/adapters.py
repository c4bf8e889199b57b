"""Routes that load and unload adapters, compatible with vLLM. Imported only if FastAPI is installed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel

from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.clients import CALLER, OPERATOR
from deepspeed.inference.serving.handling import Intake, refusal
from deepspeed.inference.serving.models import Models


class LoadRequest(BaseModel):
    """``load_inplace``: replace an adapter of this name. ``base_model_name``: the model that it adapts; default: the
    first."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str = ""


class UnloadRequest(BaseModel):
    lora_name: str


def add_adapter_routes(app: FastAPI, intake: Intake, models: Models) -> None:
    """Add the routes. They require the server's token, since they read files of its machine."""

    def load(body: bytes, _: Any) -> str:
        request: LoadRequest = protocol.fields_as(LoadRequest, body)
        models.add(request.lora_name, request.lora_path, request.base_model_name, anew=request.load_inplace)
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    def unload(body: bytes, _: Any) -> str:
        request: UnloadRequest = protocol.fields_as(UnloadRequest, body)
        models.remove(request.lora_name)
        return f"Success: LoRA adapter '{request.lora_name}' removed successfully."

    async def answer(
        request: Request, work: Callable[[bytes, Any], str], threads: ThreadPoolExecutor | None = None
    ) -> Response:
        intake.authorize(request)
        if request.scope.get(CALLER) != OPERATOR:
            message = "loading and unloading adapters requires a server token"
            return refusal(403, message, "permission_error")
        return PlainTextResponse(await intake.take(request, work, threads))

    @app.post("/v1/load_lora_adapter")
    async def loading(request: Request) -> Response:
        return await answer(request, load, intake.loads)

    @app.post("/v1/unload_lora_adapter")
    async def unloading(request: Request) -> Response:
        return await answer(request, unload)
