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

from deepspeed.inference.scheduling.requests import NotFiniteError
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


class Refused(Exception):
    """A request gets ``response``, an error, instead of what it asks for. The application sends it."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"status {response.status_code}")
        self.response = response


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

    def authorize(self, request: Request) -> None:
        """Refused: a key is required, and the request has none of them."""
        if self._keys:
            owner = owner_of(request.headers.get("authorization", ""), self._keys)
            request.scope[CALLER] = owner
            if owner is None:
                message = "the token in the Authorization header is missing or wrong"
                raise Refused(refusal(401, message, "authentication_error"))

    def _count(self, request: Request) -> None:
        """Count the request. Refused: it exceeds its client's rate."""
        client = request.scope.get(CALLER) or (request.client.host if request.client else "")
        wait = self._rate.take(client, time.monotonic()) if self._rate is not None else 0.0
        if wait:
            rate = f"more than {self.settings.requests_per_minute:g} requests per minute"
            headers = {"Retry-After": str(math.ceil(wait))}
            message = f"{rate}: try again in {wait:.0f} s"
            raise Refused(refusal(429, message, "rate_limit_error", headers=headers))

    async def take(
        self,
        request: Request,
        work: Callable[[bytes, asyncio.AbstractEventLoop], _Made],
        threads: ThreadPoolExecutor | None = None,
    ) -> _Made:
        """Return the result of ``work``, called with the body and the event loop on another thread. ``threads``:
        instead of the default ones. Refused: the request is unauthorized, or its body or ``work`` raises an error of
        the client or the service."""
        self.authorize(request)
        self._count(request)
        try:
            self._services.check_open()
            body, loop = await self._body(request), asyncio.get_running_loop()
            usual = self._long if sum(map(len, body)) > LONG else self._short
            return await loop.run_in_executor(threads or usual, _worked, work, body, loop)
        except ClientDisconnect:
            refused = _client_gone()
        except asyncio.TimeoutError:
            message = f"the request did not arrive within {self.settings.body_seconds:g} s"
            refused = refusal(408, message, "invalid_request_error")
        except (ValueError, BusyError, ClosedError) as problem:
            refused = refusal_of(problem)
        raise Refused(refused)

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


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _Made]) -> _Made:
    """Return the result of ``work``, or raise its exception. ``work`` is cancelled if the client, whose body has been
    read, disconnects (Refused)."""
    running, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise Refused(_client_gone())
        return running.result()
    finally:
        gone.cancel()
        running.cancel()


async def _until_gone(request: Request) -> None:
    with contextlib.suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


def _client_gone() -> Response:
    return Response(status_code=499)


_REFUSALS: tuple[tuple[type[Exception], int, str, dict[str, str]], ...] = (
    (_TooLargeError, 413, "invalid_request_error", {}),
    (ModelError, 404, "invalid_request_error", {}),
    (BusyError, 429, "rate_limit_error", {"Retry-After": "1"}),
    (OverdueError, 504, "server_error", {"X-Should-Retry": "false"}),  # OpenAI's clients would retry it
    (ClosedError, 503, "server_error", {}),
    (NotFiniteError, 500, "server_error", {}),
    (Exception, 400, "invalid_request_error", {}),
)
"""Error of the client or the service -> status, type and headers of the response; the first that fits."""


def refusal_of(problem: Exception) -> Response:
    """Return the error response for an exception of the client or the service."""
    status, kind, headers = next(row[1:] for row in _REFUSALS if isinstance(problem, row[0]))
    if isinstance(problem, ClosedError) and problem.retry_after is not None:
        headers = {"Retry-After": str(problem.retry_after)}
    field, code = (problem.field, problem.code) if isinstance(problem, RequestError) else (None, None)
    return refusal(status, str(problem), kind, field, code=code, headers=headers)


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
