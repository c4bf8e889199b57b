"""A generator without a model, and a tokenizer of bytes: what the tests of serving share."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepspeed.inference.cache.blocks import BlockManager, BlockPool
from deepspeed.inference.scheduling.requests import Request, SamplingParams, TokenLogprob
from deepspeed.inference.scheduling.scheduler import Scheduler
from deepspeed.inference.serving.models import ServedModel
from deepspeed.inference.serving.service import Service, Update
from deepspeed.inference.serving.tokenizers import BEGIN

REPLY = "Grüße, wörld 🙂! "


class Bytes:
    """One token for each byte of UTF-8."""

    specials: Mapping[int, str] = {}
    template = "<role>content"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    words = encode

    def decode_all(self, tokens: list[int]) -> str:
        return self.decode(tokens)

    def names(self, tokens: list[int]) -> list[str]:
        return [f"<{token}>" for token in tokens]

    def info(self) -> dict[str, Any]:
        return {"tokenizer_class": "Bytes", "eos_token": None}

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def chat(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any] = BEGIN) -> list[int]:
        return self.encode("".join(f"<{each['role']}>{each['content']}" for each in messages))


class Parrot:
    """Says REPLY again and again, and ``delay`` seconds pass in each forward. ``fails_at``: the number of the forward
    that raises. ``cuts``: first token of a prompt -> the reason to end after three tokens. ``more``: arguments of the
    scheduler."""

    def __init__(
        self,
        *,
        delay: float = 0.0,
        fails_at: int | None = None,
        cuts: Mapping[int, str] | None = None,
        num_blocks: int = 256,
        **more: Any,
    ) -> None:
        manager = BlockManager(BlockPool(num_blocks), 4)
        self.scheduler = Scheduler(manager, **{"token_budget": 64, "max_sequences": 16, **more})
        self.delay = delay
        self.fails_at = fails_at
        self.cuts = cuts or {}
        self.forwards = 0
        self.logprob = -0.5
        self._next = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.scheduler.check(Request(0, prompt, params))

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        request = Request(self._next, prompt, params)
        self._next += 1
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        self.scheduler.cancel(request)

    def step(self) -> list[Request]:
        self.forwards += 1
        if self.forwards == self.fails_at:
            raise RuntimeError("the device is gone")
        time.sleep(self.delay)
        chunks = self.scheduler.schedule()
        reply = REPLY.encode()
        tokens = {}
        for chunk in chunks:
            request = chunk.request
            if chunk.is_last and request.computes_prompt:
                request.prompt_logprobs = [
                    TokenLogprob(token, self.logprob / 2) for token in request.prompt[1:]
                ]
            if request.prompt[0] in self.cuts and len(request.generated) == 3:
                request.cut = self.cuts[request.prompt[0]]
            elif chunk.is_last and request.params.max_new_tokens:
                tokens[request.id] = reply[len(request.generated) % len(reply)]
                if request.params.logprobs:
                    request.logprobs.append(TokenLogprob(tokens[request.id], self.logprob))
        self.scheduler.complete(chunks, tokens)
        return []

    def state(self) -> dict[str, float]:
        return {"free_blocks": self.scheduler.blocks.pool.num_free}


def served(service: Service, tokenizer: Bytes | None = None, **more: Any) -> ServedModel:
    """The model "parrot" of a server."""
    given = {"name": "parrot", "max_length": 1024, "stop_token_ids": (0,), **more}
    return ServedModel(service=service, tokenizer=tokenizer or Bytes(), **given)


def stream(service: Service, prompt: Sequence[int], params: SamplingParams) -> Iterator[Update]:
    """Yield the updates of one request; closing the iterator cancels it. A failure of the service is raised."""
    updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
    ticket, reason = service.submit(prompt, params, updates.put), None
    try:
        while reason is None:
            update = updates.get()
            reason = update.reason
            if update.error is not None:
                raise update.error
            yield update
    finally:
        service.cancel(ticket, reason or "cancelled")
