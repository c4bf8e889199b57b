"""The connections of a server: timeouts, acceptance and shutdown. Imported only if uvicorn is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.clients import Certificate
from deepspeed.inference.serving.service import RETRY_AFTER_S, Services

HEADERS_S = 20.0
"""Timeout for receiving the headers of a request."""

_READ_BYTES = 32 * 2**10
"""Bytes read from a connection per iteration of the event loop. 50 clients that send long bodies at once then block it
for 10 ms; with asyncio's 256 KiB, for 40 ms."""

_SWITCH_S = 0.001
"""Interval after which a running thread releases the interpreter lock. The event loop waits for the lock about six
times per request: after each system call."""

_LAST_WORDS_S = 2.0
"""Time for sending the errors of interrupted answers, and for reading the rest of a request refused early."""

_POLL_S = 0.05


def make_listener(
    app: Any,
    services: Services,
    *,
    host: str,
    port: int,
    drain_seconds: float,
    ready: Callable[[str], None],
    certificate: Certificate | None = None,
) -> Listener:
    """Create a server of ``app``, not started; see ``Listener``. ``certificate``: use TLS."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        http=_Connection,
        ssl_certfile=certificate and certificate.file,
        ssl_keyfile=certificate and certificate.key_file,
        ws="none",
        lifespan="off",  # a second Ctrl-C could interrupt it
    )
    return Listener(config, services, drain_seconds, ready)


class Listener(uvicorn.Server):
    """
    Args:
        ready: called with the address once connections are accepted.
        drain_seconds: time to finish answers after SIGTERM or Ctrl-C. Unfinished ones then end with an error, and
            connections whose clients do not read it are closed.
    """

    def __init__(
        self, config: uvicorn.Config, services: Services, drain_seconds: float, ready: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._services = services
        self._drain_seconds = drain_seconds
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            self._ready(_address(self.config.host, port, secure=self.config.is_ssl))

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(usual, _SWITCH_S))
        try:
            super().run(sockets)
        finally:
            sys.setswitchinterval(usual)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.drain()
        begun = set(self.server_state.tasks)
        ending = asyncio.create_task(self._end_answers())
        try:
            # Connections are still accepted: /ready and new requests get 503.
            while not (self.force_exit or all(task.done() for task in begun)):
                await asyncio.sleep(_POLL_S)
            await super().shutdown(sockets)  # waits until all connections are closed
        finally:
            ending.cancel()
            self._hang_up()  # connections are left only after a second Ctrl-C
            if self.server_state.tasks:
                await asyncio.wait(set(self.server_state.tasks), timeout=_LAST_WORDS_S)
            # No clients are left, and the service must not call a closed loop.
            await asyncio.to_thread(self._services.close, drain=False)

    async def _end_answers(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await asyncio.to_thread(self._services.close, drain=False)
        await asyncio.sleep(_LAST_WORDS_S)
        self._hang_up()

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class LoadingAnswers:
    """Responds on a server's address while its model is loading: 200 to ``/health``, 503 to everything else.

    OSError: the address cannot be used.
    """

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        opening = asyncio.start_server(_answer_loading, host, port, ssl=context)
        self._server = self._loop.run_until_complete(opening)
        self._thread = threading.Thread(target=self._loop.run_forever, name="deepspeed-loading", daemon=True)
        self._thread.start()

    def hand_over(self) -> list[socket.socket]:
        """Stop responding. Returns the listening sockets, with connections waiting to be accepted."""
        sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in self._server.sockets]
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for each in self._server.sockets:  # closing the server would drop accepted connections
            self._loop.remove_reader(each.fileno())
        self._loop.run_until_complete(self._cancel())
        self._server.close()
        self._loop.close()
        return sockets

    async def _cancel(self) -> None:
        """Wait for accepted connections to be answered and closed; those that take longer are cut off."""
        for cut_off in (False, True, True):  # the last time in the midst of closing
            until = self._loop.time() + _POLL_S
            # Tasks that accept a connection make the one that answers it, and that one ends with its transport.
            while (tasks := asyncio.all_tasks() - {asyncio.current_task()}) and self._loop.time() < until:
                if cut_off:
                    for task in tasks:
                        task.cancel()
                await asyncio.wait(tasks, timeout=until - self._loop.time())

    def close(self) -> None:
        """Close the sockets, unless they were handed over."""
        for each in () if self._loop.is_closed() else self.hand_over():
            each.close()


async def _answer_loading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    failures = (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError, asyncio.CancelledError)
    with contextlib.suppress(*failures, ValueError, LookupError):  # the last two: a malformed head
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEADERS_S)
        alive = head.split(b" ", 2)[1].partition(b"?")[0] == b"/health"
        loading = protocol.error("the model is being loaded: try again later", "server_error")
        status = "200 OK" if alive else f"503 Service Unavailable\r\nRetry-After: {RETRY_AFTER_S}"
        writer.write(_last_answer(status, {"status": "loading"} if alive else loading))
        if writer.can_write_eof():  # not with TLS
            writer.write_eof()
        await asyncio.wait_for(_until_end(reader), _LAST_WORDS_S)  # a reset could overtake the response
    writer.close()
    with contextlib.suppress(*failures):
        await writer.wait_closed()


def _last_answer(status: str, content: Any) -> bytes:
    """Return an answer in JSON after which the connection is closed."""
    body = json.dumps(content).encode()
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{head}\r\n\r\n".encode() + body


async def _until_end(reader: asyncio.StreamReader) -> None:
    while await reader.read(_READ_BYTES):
        pass


class _Connection(H11Protocol):
    """Closed if the headers of a request take longer than ``HEADERS_S``. h11 itself bounds their length, which another
    installed protocol may not do."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own event loop
            transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()  # a request has arrived
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self._cut_off)

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut_off(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"the headers did not arrive within {HEADERS_S:g} s"
            answer = _last_answer("408 Request Timeout", protocol.error(message, "invalid_request_error"))
            self.transport.write(answer)
        self.transport.close()


def _address(host: str, port: int, *, secure: bool) -> str:
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
