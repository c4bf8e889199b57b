"""Clients of a server: API keys, rate limits, TLS certificate, request ids, access log and traces."""

from __future__ import annotations

import hmac
import logging
import re
import ssl
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.base.extras import install_hint
from deepspeed.observe.live.access import check_token

REQUEST_ID = "x-request-id"
CALLER = "deepspeed.caller"
"""Scope entry with the name of the client's key."""
OPERATOR = "token"
"""Name of the server's own key, which has more rights than those of clients."""
_ID = re.compile(rb"[!-~]{1,128}")
_SWEEP = 4096
_QUIET = "health,ready,metrics"
"""Paths that probes poll."""


def read_keys(path: str | Path) -> dict[str, str]:
    """Read a file with one ``name key`` pair per line into a dict by name. Empty lines and lines starting with # are
    ignored.

    OSError, ValueError: the file, or the named line, cannot be read. No message shows a key.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ValueError(f"{path}, line {number}: {len(words)} words, expected a name and a key")
        name, key = words
        check_token(key, f"{path}, line {number}")
        if name in (*keys, OPERATOR) or key in keys.values():
            raise ValueError(f"{path}, line {number}: the name {name!r}, or its key, is already taken")
        keys[name] = key
    if not keys:
        raise ValueError(f"{path}: contains no key")
    return keys


def owner_of(authorization: str, keys: Mapping[str, str]) -> str | None:
    """Return the name of the key in an ``Authorization`` header; None: unknown. All keys are compared, so that timing
    reveals nothing."""
    given = authorization.encode()
    found = [name for name, key in keys.items() if hmac.compare_digest(given, f"Bearer {key}".encode())]
    return found[0] if found else None


class Certificate(NamedTuple):
    """PEM files. ``key_file`` None: the key is in ``file`` too."""

    file: str
    key_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return a TLS context. OSError, such as ``ssl.SSLError``: unreadable, or not a certificate and its key."""
        made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        made.load_cert_chain(self.file, self.key_file)
        return made


class RateLimit:
    """Allows each client a burst of ``per_minute`` requests, at least one, and the same number in every further minute
    (generic cell rate algorithm, ITU-T I.371)."""

    def __init__(self, per_minute: float) -> None:
        self._interval = 60 / per_minute
        self._paid_until: dict[str, float] = {}

    def take(self, client: str, now: float) -> float:
        """Count a request of ``client`` at ``now`` [s]. Return 0, or the seconds to wait until it is allowed."""
        paid_until = max(self._paid_until.get(client, now), now) + self._interval
        wait = paid_until - now - max(60, self._interval)
        if wait > 1e-6:
            return wait
        if len(self._paid_until) > _SWEEP:
            self._paid_until = {name: until for name, until in self._paid_until.items() if until > now}
        self._paid_until[client] = paid_until
        return 0.0


class RequestLog:
    """ASGI middleware: responses carry their request's id in ``X-Request-Id``, the client's own if it sent one. When a
    response has ended, ``write`` gets a line: time, client, key name, request, status (499: the client left before
    there was one), seconds and id."""

    def __init__(self, app: Any, write: Callable[[str], object] | None = None) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"")
        id = given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()
        begun, status = time.monotonic(), 499

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID.encode(), id)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._write is not None:
                seconds = time.monotonic() - begun
                self._write(_line(scope, status, seconds, id.decode()))


def _line(scope: Any, status: int, seconds: float, id: str) -> str:
    at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    host = (scope.get("client") or ("-",))[0]
    path = scope.get("raw_path", b"").decode("latin-1").replace('"', "%22")
    return f'{at} {host} {scope.get(CALLER) or "-"} "{scope["method"]} {path}" {status} {seconds:.3f} {id}'


def access_log(target: str) -> Callable[[str], object]:
    """Return a function that writes lines to the file ``target`` (reopened after log rotation), or, for ``-``, to
    standard error. OSError: it cannot be written."""
    handler = logging.StreamHandler(sys.stderr) if target == "-" else WatchedFileHandler(target)
    log = logging.Logger("deepspeed.access", logging.INFO)
    log.addHandler(handler)
    return log.info


def trace(app: Any, endpoint: str, model: str) -> None:
    """Send an OpenTelemetry span per request to ``endpoint`` (OTLP over HTTP), within the client's trace if it sends
    one. ValueError: a package is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        packages = ("opentelemetry-exporter-otlp-proto-http", "opentelemetry-instrumentation-fastapi")
        hints = " and ".join(install_hint(package, extra="otel") for package in packages)
        raise ValueError(f"--otlp-traces-endpoint needs OpenTelemetry ({error}): {hints}") from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": "deepspeed", "deepspeed.model": model})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls=_QUIET, exclude_spans=["receive", "send"]
    )
