"""Access log and traces of a server's requests."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from logging.handlers import WatchedFileHandler
from typing import Any

from deepspeed.base.extras import install_hint

_QUIET = "health,ready,metrics"
"""Paths that probes poll."""


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
