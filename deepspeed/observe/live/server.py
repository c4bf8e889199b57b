"""HTTP server of the live page: the standard library's threading server, with two paths, `/` and `/data`.

The page itself holds no data and loads nothing from other hosts. `/data` returns the entries since a visitor's last
request (``MetricHistory.answer``). If the server listens beyond this machine, `/data` requires a token; the page asks
the visitor for it and sends it as a header, so that it appears in no URL, log or browser history.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from deepspeed.observe.live.access import check_token, is_local, names_this_machine
from deepspeed.observe.live.history import MetricHistory

TOKEN_VARIABLE = "DEEPSPEED_LIVE_TOKEN"
TOKEN_FILE = "token"
NEXT_PORTS = 100
REQUEST_S = 10.0  # timeout of an idle connection
MAX_VISITORS = 32


def token_for(host: str, folder: Path) -> str | None:
    """Return the token of a server at this address: the environment's, else the folder's, else a new one that is
    written there. None: a local address needs none. ValueError: clients cannot send it."""
    named = os.environ.get(TOKEN_VARIABLE)
    if named:
        check_token(named, TOKEN_VARIABLE)
        return named
    if is_local(host):
        return None
    path = folder / TOKEN_FILE
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    token = path.read_text(encoding="ascii").strip()
    if not token:
        raise ValueError(f"{path} is empty: remove it, or set {TOKEN_VARIABLE}")
    check_token(token, str(path))
    return token


class PageServer:
    """Serves a history until ``close``. Errors of a visitor's connection are ignored.

    ValueError: the address has no usable port.
    """

    def __init__(self, history: MetricHistory, host: str, port: int, token: str | None) -> None:
        self.host, self.token = host, token
        self._history = history
        self._page, self._policy = page()
        self._visitors = threading.BoundedSemaphore(MAX_VISITORS)
        self._server = self._listen(port)
        self.port: int = self._server.server_address[1]
        self._alarm, self._asleep = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="deepspeed live page", daemon=True)
        self._pid = os.getpid()
        self._thread.start()

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        if self._pid != os.getpid() or not self._thread.is_alive():
            return
        # The garbage collector may close an engine in the serving thread itself, which cannot join itself.
        if self._thread is threading.current_thread():
            threading.Thread(target=self.close, daemon=True).start()
            return
        self._alarm.close()
        self._thread.join()
        self._server.server_close()
        self._asleep.close()

    def _serve(self) -> None:
        """Serve until ``close``. Blocks instead of polling, which would take CPU time from the training steps."""
        with selectors.DefaultSelector() as selector:
            for each in (self._server.socket, self._asleep):
                selector.register(each, selectors.EVENT_READ)
            while all(key.fileobj is not self._asleep for key, _ in selector.select()):
                self._server.handle_request()

    def _listen(self, port: int) -> ThreadingHTTPServer:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        owner = self

        class Server(ThreadingHTTPServer):
            address_family = family
            daemon_threads = True
            timeout = 0  # `handle_request` is called only for a pending connection

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore errors of a connection, such as a closed browser."""

            def server_bind(self) -> None:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(self.server_address)  # unlike HTTPServer's, without a DNS look-up
                self.server_address = self.socket.getsockname()
                self.server_name, self.server_port = owner.host, self.server_address[1]

        class Handler(_Handler):
            page_server = owner

        ports = [port, *range(port + 1, min(port + NEXT_PORTS, 65536)), 0] if port else [0]
        problem: OSError | None = None
        for each in ports:
            try:
                return Server((self.host, each), Handler)
            except OSError as error:
                problem = error
        raise ValueError(f"monitor.live.host={self.host!r}: cannot listen there ({problem})")

    # ---- answers

    def answer(self, target: str, headers: Any) -> tuple[int, str, bytes]:
        """Return (status, content type, body) for a request."""
        url = urlsplit(target)
        if not (self.token is not None or names_this_machine(headers.get("Host", ""))):
            return _text(
                403,
                f"This page is only available on this machine. Set {TOKEN_VARIABLE} to allow others, with a token.",
            )
        if url.path == "/":
            return 200, "text/html; charset=utf-8", self._page
        if url.path != "/data":
            return _text(404, "Not found: only / and /data exist.")
        if not self._is_allowed(headers.get("Authorization", "")):
            return _text(401, "Token required.")
        asked = parse_qs(url.query)
        epoch, since = (_number(asked.get(name)) for name in ("epoch", "since"))
        body = json.dumps(self._history.answer(epoch, since), separators=(",", ":"), default=str)
        return 200, "application/json", body.encode()

    def _is_allowed(self, authorization: str) -> bool:
        if self.token is None:
            return True
        given = authorization.removeprefix("Bearer ").encode("utf-8", "replace")
        return hmac.compare_digest(given, self.token.encode("utf-8", "replace"))


class _Handler(BaseHTTPRequestHandler):
    page_server: PageServer
    timeout = REQUEST_S
    server_version, sys_version = "deepspeed", ""

    def do_GET(self) -> None:
        owner = self.page_server
        if not owner._visitors.acquire(blocking=False):
            return self._send(*_text(503, "Too many concurrent visitors."))
        try:
            self._send(*owner.answer(self.path, self.headers))
        finally:
            owner._visitors.release()

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", self.page_server._policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: neither addresses nor requests belong in a training log."""


def page() -> tuple[bytes, str]:
    """Return the page, and its Content-Security-Policy (``policy_of``)."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return text.encode(), policy_of(text)


def policy_of(text: str) -> str:
    """Return the Content-Security-Policy that allows only the script and the style of the page ``text``, by hash, and
    no loads from other hosts."""
    sources = []
    for tag in ("script", "style"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert found is not None
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        sources.append(f"{tag}-src 'sha256-{digest}'; ")
    return (
        f"default-src 'none'; {''.join(sources)}connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


def _text(status: int, text: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", text.encode()


def _number(values: list[str] | None) -> int:
    text = values[-1] if values else ""
    return int(text) if text.isascii() and text.isdigit() else -1
