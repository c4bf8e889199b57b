"""Shared by all routes: authentication, rate limits, reading of bodies, worker threads and error responses. Imported
only if FastAPI is installed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.bodies import LONG
from deepspeed.inference.serving.clients import CALLER, OPERATOR, RateLimit, owner_of
from deepspeed.inference.serving.models import ModelError
from deepspeed.inference.serving.protocol import RequestError
from deepspeed.inference.serving.service import BusyError, ClosedError, OverdueError, Services
from deepspeed.observe.live.access import check_token

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """``token``: required of clients, or one of ``keys``, by owner; neither: only requests to a name of this machine
    are accepted. ``requests_per_minute``: per client, by key or else by address. ``allowed_origins``: of pages that may
    read responses in a browser (CORS). ``max_body_bytes``: per request; ``body_seconds``: timeout for receiving a
    body."""

    token: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    requests_per_minute: float | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token, "token")

    @property
    def all_keys(self) -> dict[str, str]:
        """Return the accepted keys by name; empty: no key is required."""
        return {**({} if self.token is None else {OPERATOR: self.token}), **self.keys}


class _TooLargeError(ValueError):
    pass


class Intake:
    """Accepts requests while any of ``services`` is open."""

    def __init__(self, settings: ServerSettings, services: Services) -> None:
        self.settings = settings
        self._services = services
        self._keys = settings.all_keys
        rate = settings.requests_per_minute
        self._rate = None if rate is None else RateLimit(rate)
        # Threads for parsing and tokenizing. Long requests, which may take seconds, wait only for each other. There are
        # few threads, since each keeps its own memory.
        self._short = ThreadPoolExecutor(2, "short-requests")
        self._long = ThreadPoolExecutor(2, "long-requests")
        self.loads = ThreadPoolExecutor(1, "adapter-loads")
        """Loads adapters one at a time: reading files may take minutes."""

    def authorize(self, request: Request) -> bool:
        if not self._keys:
            return True
        owner = owner_of(request.headers.get("authorization", ""), self._keys)
        request.scope[CALLER] = owner
        return owner is not None

    def _too_fast(self, request: Request) -> Response | None:
        """Count the request. Returns a 429 response if it exceeds its client's rate, else None."""
        client = request.scope.get(CALLER) or (request.client.host if request.client else "")
        wait = self._rate.take(client, time.monotonic()) if self._rate is not None else 0.0
        if not wait:
            return None
        message = (
            f"more than {self.settings.requests_per_minute:g} requests per minute: try again in {wait:.0f} s"
        )
        return refusal(429, message, "rate_limit_error", headers={"Retry-After": str(math.ceil(wait))})

    async def take(
        self,
        request: Request,
        work: Callable[[bytes, asyncio.AbstractEventLoop], _Made],
        threads: ThreadPoolExecutor | None = None,
    ) -> _Made | Response:
        """Return the result of ``work``, called with the body and the event loop on another thread; or an error
        response, if the request is unauthorized, or its body or ``work`` raises an error of the client or the service.
        ``threads``: instead of the default ones."""
        if not self.authorize(request):
            return unauthorized()
        if (refused := self._too_fast(request)) is not None:
            return refused
        try:
            self._services.check_open()
            body, loop = await self._body(request), asyncio.get_running_loop()
            usual = self._long if sum(map(len, body)) > LONG else self._short
            return await loop.run_in_executor(threads or usual, _worked, work, body, loop)
        except ClientDisconnect:
            return Response(status_code=499)  # client gone
        except asyncio.TimeoutError:
            seconds = self.settings.body_seconds
            return refusal(408, f"the request did not arrive within {seconds:g} s", "invalid_request_error")
        except (ValueError, BusyError, ClosedError) as problem:
            return refusal_of(problem)

    async def _body(self, request: Request) -> list[bytes]:
        """Read the chunks of a body. TimeoutError: they arrive too slowly. _TooLargeError: the body is too large."""
        most = self.settings.max_body_bytes
        too_large = _TooLargeError(f"a request may have at most {most} bytes")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise too_large  # before allocating memory for it

        async def read() -> list[bytes]:
            parts, size = [], 0
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise too_large
            return parts

        return await asyncio.wait_for(read(), self.settings.body_seconds)


def _worked(work: Callable[[bytes, Any], _Made], body: list[bytes], loop: asyncio.AbstractEventLoop) -> _Made:
    """Call ``work``, and free the parsed values in this thread, also after an error, whose frames are dropped: up to
    500,000 values take 10 ms."""
    try:
        return work(b"".join(body), loop)
    except (ValueError, BusyError, ClosedError) as problem:
        problem.__context__ = None
        raise problem.with_traceback(None) from None


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _Made]) -> _Made | Response:
    """Return the result of ``work``, or raise its exception. ``work`` is cancelled if the client, whose body has been
    read, disconnects."""
    running, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else Response(status_code=499)  # client gone
    finally:
        gone.cancel()
        running.cancel()


async def _until_gone(request: Request) -> None:
    with contextlib.suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


def refusal_of(problem: Exception) -> Response:
    """Return the error response for an exception of the client or the service."""
    if isinstance(problem, _TooLargeError):
        return refusal(413, str(problem), "invalid_request_error")
    if isinstance(problem, ModelError):
        return refusal(404, str(problem), "invalid_request_error", "model", code="model_not_found")
    if isinstance(problem, BusyError):
        return refusal(429, str(problem), "rate_limit_error", headers={"Retry-After": "1"})
    if isinstance(problem, OverdueError):  # OpenAI's clients would retry it
        return refusal(504, str(problem), "server_error", headers={"X-Should-Retry": "false"})
    if isinstance(problem, ClosedError):
        after = problem.retry_after
        headers = None if after is None else {"Retry-After": str(after)}
        return refusal(503, str(problem), "server_error", headers=headers)
    field, code = (problem.field, problem.code) if isinstance(problem, RequestError) else (None, None)
    return refusal(400, str(problem), "invalid_request_error", field, code=code)


def unauthorized() -> Response:
    return refusal(401, "the token in the Authorization header is missing or wrong", "authentication_error")


def refusal(
    status: int,
    message: str,
    kind: str,
    field: str | None = None,
    *,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return JSONResponse(protocol.error(message, kind, field, code), status, headers=headers)
