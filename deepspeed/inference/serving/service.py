"""One generator for many clients: a thread runs it, and clients submit from any thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, Protocol

import torch

from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import logger
from deepspeed.comm.collectives import Communicator
from deepspeed.inference.scheduling.requests import (
    Constraint,
    NotFiniteError,
    Request,
    SamplingParams,
    State,
    TokenLogprob,
)
from deepspeed.inference.serving.metrics import Metrics, page_of

_PULSE_S = 10.0
"""Interval at which other ranks hear from an idle server, far below the timeout of a collective."""


# Commands of rank 0.
#
# Tensor-parallel ranks run identical schedulers, so they must see the same requests at the same time. Rank 0 serves the
# clients, and broadcasts their commands before each forward.


@dataclass(slots=True)
class Commands:
    """``submitted``: (number, prompt, params) of new requests; ``cancelled``: numbers; ``ends``: stop after these, with
    no further forward."""

    submitted: list[tuple[int, Sequence[int], SamplingParams]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    ends: bool = False

    def to_bytes(self) -> bytes:
        plain = {
            "submitted": [
                (number, list(prompt), asdict(params)) for number, prompt, params in self.submitted
            ],
            "cancelled": self.cancelled,
            "ends": self.ends,
        }
        return json.dumps(plain).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Commands:
        plain = json.loads(data)
        submitted = [(number, prompt, _params(params)) for number, prompt, params in plain["submitted"]]
        return cls(submitted, plain["cancelled"], plain["ends"])


def _params(plain: dict[str, Any]) -> SamplingParams:
    given = {name: _tuples(value) for name, value in plain.items()}
    if given["constraint"] is not None:
        constraint = given["constraint"]
        given["constraint"] = Constraint(**{name: _tuples(value) for name, value in constraint.items()})
    return SamplingParams(**given)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def broadcast(group: Communicator, device: torch.device, commands: Commands) -> Commands:
    """Return rank 0's commands on all ranks of ``group``; ranks without clients pass empty ones. Collective: two small
    broadcasts, the second only if there are commands.

    CommunicationError: a rank does not answer within the group's timeout.
    """
    leads = group.rank == 0
    empty = not (commands.submitted or commands.cancelled or commands.ends)
    data = commands.to_bytes() if leads and not empty else b""
    length = torch.tensor([len(data)], device=device)
    group.broadcast(length, src=0).wait()
    if not int(length):
        return Commands()
    content = torch.empty(int(length), dtype=torch.uint8)
    if leads:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    content = content.to(device)
    group.broadcast(content, src=0).wait()
    return commands if leads else Commands.from_bytes(bytes(content.tolist()))


class BusyError(ExplainedError, RuntimeError):
    """The server has reached its maximum of requests: try again later."""


RETRY_AFTER_S = 5
"""Value of ``Retry-After`` while a server loads or drains: then another one, or its successor, may be ready."""


class ClosedError(ExplainedError, RuntimeError):
    """The server is shutting down or has failed; the message says which. ``retry_after``: seconds; None: it has
    failed."""

    def __init__(self, why: str, retry_after: int | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class OverdueError(ClosedError):
    """A request has exceeded the time limit."""


class Engine(Protocol):
    """The part of a ``Generator`` used here."""

    @property
    def has_work(self) -> bool: ...
    def check(self, prompt: Sequence[int], params: SamplingParams) -> None: ...
    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request: ...
    def cancel(self, request: Request) -> None: ...
    def step(self) -> list[Request]: ...
    def state(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Update:
    """News of a request: another token, the end, or both. ``prompt``: log-probabilities of the prompt, with the first
    update, if requested. ``pooled``: the vector of an embedding request. ``error``: the reason, if the request
    failed."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    reason: str | None = None
    prompt: Sequence[TokenLogprob] | None = None
    pooled: Any = None
    error: Exception | None = None


Listener = Callable[[Update], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A client's request. ``listener`` is called on the service's thread, and must return immediately. ``counted``:
    whether it is in the metrics."""

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    listener: Listener
    arrived: float
    request: Request | None = None
    given: int = 0
    latest: float = 0.0  # time of its last token
    counted: bool = False


class Service:
    """
    Args:
        engine: the generator, used only by the service's thread from now on.
        max_requests: maximum number of waiting and running requests.
        request_seconds: time after which an unfinished request is cancelled; None: never.
        announce: makes rank 0's commands those of all ranks (`broadcast`); None: there is one rank. Ranks other than
            the first call ``follow`` instead of ``start``.

    Methods may be called from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int = 256,
        request_seconds: float | None = None,
        announce: Callable[[Commands], Commands] | None = None,
    ) -> None:
        self.engine = engine
        self.max_requests = max_requests
        self.request_seconds = request_seconds
        self.metrics = Metrics()
        self.failure: BaseException | None = None
        self.draining = False
        """Whether only requests that have already been submitted are served."""
        self._announce = announce or (lambda commands: commands)
        self._changed = threading.Condition()
        self._new = Commands()
        self._tickets: dict[int, Ticket] = {}  # waiting or running
        self._last_number = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="deepspeed-generation", daemon=True)

    # ---------------------------------------------------------------------------------------------- clients

    def start(self) -> Service:
        self._thread.start()
        return self

    def submit(self, prompt: Sequence[int], params: SamplingParams, listener: Listener) -> Ticket:
        """Submit a request, whose updates go to ``listener``. The caller must call ``cancel`` in the end.

        Raises:
            ValueError: the prompt is empty, or the request too long.
            BusyError: there are ``max_requests`` already.
            ClosedError: the service accepts no requests.
        """
        self.engine.check(prompt, params)
        with self._changed:
            if self._closing or self.failure is not None:
                raise self._closed()
            self._check_room(1)
            self._last_number += 1
            ticket = Ticket(self._last_number, prompt, params, listener, time.monotonic())
            self._tickets[ticket.number] = ticket
            self._new.submitted.append((ticket.number, prompt, params))
            self._changed.notify_all()
        return ticket

    def check_room(self, requests: int) -> None:
        """Check for free capacity. BusyError: this many requests do not fit."""
        with self._changed:
            self._check_room(requests)

    def cancel(self, ticket: Ticket, reason: str = "cancelled") -> None:
        """End a request for its client: stop serving it, and count it once by ``reason``. Only the client knows the
        reason: the service may be ahead of what a stop text lets the client read."""
        with self._changed:
            if ticket.number in self._tickets:
                self._new.cancelled.append(ticket.number)
                self._changed.notify_all()
            if ticket.counted:
                return
            ticket.counted = True
        self.metrics.finished(reason, time.monotonic() - ticket.arrived)

    @property
    def healthy(self) -> bool:
        """Return whether the service accepts requests."""
        return self.failure is None and not (self.draining or self._closing) and self._thread.is_alive()

    def state(self) -> dict[str, float]:
        """Return current values by name."""
        return {"requests": len(self._tickets), "healthy": self.healthy, **self.engine.state()}

    def check_open(self) -> None:
        """Check whether requests are accepted. ClosedError: they are not."""
        if not self.healthy:
            raise self._closed()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more requests; with ``drain`` finish the submitted ones, otherwise cancel them. Waits at most
        ``timeout`` seconds, then cancels the rest. Clients of cancelled requests get a ClosedError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not drain:
            self._cancel_all()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._cancel_all()
            self._thread.join()

    def _cancel_all(self) -> None:
        with self._changed:
            self._new.cancelled += list(self._tickets)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------- the thread

    def follow(self) -> None:
        """Run the generator on a rank other than the first, until that one ends."""
        requests: dict[int, Request] = {}
        while True:
            commands = self._announce(Commands())
            for number, prompt, params in commands.submitted:
                requests[number] = self.engine.submit(prompt, params)
            for number in commands.cancelled:
                if number in requests:
                    self.engine.cancel(requests[number])
            if commands.ends:
                return
            if self.engine.has_work:
                self.engine.step()
            requests = {n: each for n, each in requests.items() if each.state is not State.FINISHED}

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException as error:
            logger.exception("inference: the generator failed")
            self._fail(error)

    def _run_once(self) -> bool:
        """Process new commands, then run a forward if there is work. Returns False once the service has ended."""
        commands = self._announce(self._take_new())
        for number, prompt, params in commands.submitted:
            self._tickets[number].request = self.engine.submit(prompt, params)
        for number in commands.cancelled:
            self._cancel(number)
        if commands.ends:
            return False
        if self.engine.has_work:
            self.engine.step()
            self._notify()
        return True

    def _take_new(self) -> Commands:
        with self._changed:
            if not self.engine.has_work:
                new = self._new
                self._changed.wait_for(lambda: new.submitted or new.cancelled or self._closing, _PULSE_S)
            commands, self._new = self._new, Commands()
            commands.cancelled += self._overdue()
            commands.ends = self._closing and not (
                self.engine.has_work or commands.submitted or commands.cancelled
            )
            return commands

    def _overdue(self) -> list[int]:
        if self.request_seconds is None:
            return []
        latest = time.monotonic() - self.request_seconds
        # They are in order of arrival.
        return [t.number for t in takewhile(lambda t: t.arrived < latest, self._tickets.values())]

    def _notify(self) -> None:
        for ticket in list(self._tickets.values()):
            request = ticket.request
            if request is None:
                continue
            new, ended = request.generated[ticket.given :], request.state is State.FINISHED
            failed = ended and request.reason == "failed"
            prompt = request.prompt_logprobs if request.params.prompt_logprobs and not ticket.given else None
            for index, token in enumerate(new, ticket.given):
                now = time.monotonic()
                if index == 0:
                    self.metrics.first_token(now - ticket.arrived)
                else:
                    self.metrics.next_token(now - ticket.latest)
                ticket.latest = now
                logprob = request.logprobs[index] if request.params.logprobs else None
                is_last = ended and not failed and index + 1 == len(request.generated)
                reason = request.reason if is_last else None
                self._inform(ticket, Update(token, logprob, reason, None if index else prompt))
            if failed:
                error = NotFiniteError("the model gives logits that are not finite")
                self._inform(ticket, Update(reason="failed", error=error))
            elif ended and not new:
                self._inform(ticket, Update(reason=request.reason, prompt=prompt, pooled=request.pooled))
            ticket.given += len(new)
            if ended:
                self._end(ticket)

    def _cancel(self, number: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            return
        if ticket.request is not None:
            self.engine.cancel(ticket.request)
        overdue = (
            self.request_seconds is not None and time.monotonic() - ticket.arrived > self.request_seconds
        )
        error = self._closed() if self._closing else None
        if overdue and error is None:
            error = OverdueError(f"the request was not answered within {self.request_seconds:g} s")
        self._inform(ticket, Update(reason="cancelled", error=error))
        self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        with self._changed:
            del self._tickets[ticket.number]
        self.metrics.computed(len(ticket.prompt), ticket.given)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            tickets = list(self._tickets.values())
        for ticket in tickets:
            self._inform(ticket, Update(reason="failed", error=self._closed()))
            self._end(ticket)

    def _inform(self, ticket: Ticket, update: Update) -> None:
        try:
            ticket.listener(update)
        except Exception:
            logger.exception(f"inference: the listener of request {ticket.number} raised")

    def _check_room(self, requests: int) -> None:
        there = len(self._tickets)
        if there + requests > self.max_requests:
            raise BusyError(f"{there} requests are being served or waiting: try again later")

    def _closed(self) -> ClosedError:
        if self.failure is not None:
            return ClosedError(f"the generator has failed: {type(self.failure).__name__}: {self.failure}")
        return ClosedError("the server is shutting down", RETRY_AFTER_S)


class Services:
    """The services of a server's models by name, with the interface of one."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._services = services

    def start(self) -> Services:
        for each in self._services.values():
            each.start()
        return self

    def follow(self) -> None:
        """See ``Service.follow``: a model on several ranks is the only one of its server."""
        for each in self._services.values():
            each.follow()

    @property
    def failure(self) -> BaseException | None:
        """Return the failure of the first service that has failed, or None."""
        return next((each.failure for each in self._services.values() if each.failure is not None), None)

    @property
    def healthy(self) -> bool:
        """Return whether all services accept requests."""
        return all(each.healthy for each in self._services.values())

    def drain(self) -> None:
        """Serve only requests that have already been submitted."""
        for each in self._services.values():
            each.draining = True

    def check_open(self) -> None:
        """Check whether requests are accepted. ClosedError: no service accepts any."""
        if not any(each.healthy for each in self._services.values()):
            next(iter(self._services.values())).check_open()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """See ``Service.close``; ``timeout`` is for all services together."""
        self.drain()
        end = None if timeout is None else time.monotonic() + timeout
        for each in self._services.values():
            each.close(drain=drain, timeout=None if end is None else max(0.0, end - time.monotonic()))

    def metrics(self) -> str:
        """Return the metrics page of all services."""
        return page_of({name: (each.metrics, each.state()) for name, each in self._services.items()})
