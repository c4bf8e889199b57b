"""Spans of a server's requests, sent to a collector by OpenTelemetry's own client."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.instrumentation.fastapi", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from deepspeed.inference.serving import app as application
from deepspeed.inference.serving.clients import trace
from tests.inference.test_http import server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(BaseHTTPRequestHandler):
    """Keeps the spans that it is sent."""

    spans: list[Any] = []
    arrived = threading.Event()

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names, span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()
        self.arrived.set()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_span_per_request_within_the_trace_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    usual = application.make_app

    def traced(*args: Any) -> Any:
        made = usual(*args)
        trace(made, f"http://127.0.0.1:{collector.server_port}/v1/traces", "parrot")
        return made

    monkeypatch.setattr("tests.inference.test_http.make_app", traced)
    with server() as running:
        assert running.call("GET", "/health")[0] == 200
        status, _ = running.post(
            {"prompt": "a", "max_tokens": 2, "stream": True}, traceparent=f"00-{TRACE}-{PARENT}-01"
        )
        assert status == 200
        assert Collector.arrived.wait(20)
    collector.shutdown()
    ((names, span),) = Collector.spans  # none of the probe, none of the parts of a stream
    assert names["service.name"] == "deepspeed" and names["deepspeed.model"] == "parrot"
    assert span.name == "POST /v1/completions"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
