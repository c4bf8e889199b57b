"""Answers being generated: updates from the service's thread become text and its parts on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from deepspeed.inference.scheduling.requests import TokenLogprob
from deepspeed.inference.serving import protocol
from deepspeed.inference.serving.pieces import Parser, Piece
from deepspeed.inference.serving.protocol import Choice, TextLogprob
from deepspeed.inference.serving.service import Service, Ticket, Update
from deepspeed.inference.serving.text import TextStream

ECHOED = 8  # prompt tokens that are decoded together with the answer's first token


class RunningAnswer:
    """One sequence of an answer: updates from the service's thread arrive on the event loop and become text."""

    def __init__(
        self,
        service: Service,
        choice: Choice,
        text: TextStream,
        loop: asyncio.AbstractEventLoop,
        parser: Parser | None = None,
    ) -> None:
        self.choice = choice
        self.reason: str | None = None
        self.new_tokens = self.reasoning_tokens = 0
        self.logprobs: list[TextLogprob] = []
        self._offset = 0  # of the next token's text
        self._service = service
        self._text = text
        self._parser = parser
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

        def listen(update: Update) -> None:
            loop.call_soon_threadsafe(self._updates.put_nowait, update)

        self._ticket: Ticket = service.submit(choice.prompt, choice.params, listen)

    async def read(self) -> AsyncIterator[tuple[list[Piece], bool]]:
        """Yield parts of the answer as they become certain, and whether they are the last. ClosedError: the service has
        ended or failed."""
        while self.reason is None:
            update = await self._updates.get()
            if update.error is not None:
                self.cancel(update.reason or "failed")
                raise update.error
            text = ""
            if update.prompt is not None:
                await asyncio.to_thread(self._note_prompt, update.prompt)  # takes a second for a long prompt
            if update.token is not None:
                self.new_tokens += 1
                if update.logprob is not None:
                    self._note(update.logprob)
                stops = update.token in self.choice.params.stop_token_ids
                text = "" if stops else self._text.add(update.token)
            if self._text.stopped:
                self.reason = "stop"
            elif update.reason is not None:
                text += self._text.finish()
                self.reason = "stop" if self._text.stopped else protocol.REASONS.get(update.reason, "stop")
            pieces = self._taken_apart(text)
            if self.reason is not None:
                self.cancel(self.reason)
            if pieces or self.reason is not None:
                yield pieces, self.reason is not None

    def _taken_apart(self, text: str) -> list[Piece]:
        """Parse ``text`` into parts. The answer ends with its last call if no more are allowed."""
        parser = self._parser
        if parser is None:
            return [Piece("text", text)] if text else []
        pieces = parser.add(text)
        self.reasoning_tokens += parser.is_reasoning
        if parser.is_complete:
            self.reason = "stop"
        if self.reason is not None:
            pieces += parser.finish()
        return pieces

    @property
    def finish_reason(self) -> str | None:
        """Return the finish reason for clients: "tool_calls" after a call, unless the last one was cut short."""
        called = self._parser is not None and self._parser.has_called
        return "tool_calls" if called and self.reason == "stop" else self.reason

    def _note(self, found: TokenLogprob, before: Sequence[int] | None = None) -> None:
        text, *others = self._text.texts_of([found.token, *(token for token, _ in found.top)], before)
        top = [(other, value) for other, (_, value) in zip(others, found.top, strict=True)]
        if top and found.token not in dict(found.top):
            top.append((text, found.value))
        self.logprobs.append(TextLogprob(text, found.value, top, self._offset))
        self._offset += len(text)

    def _note_prompt(self, found: Sequence[TokenLogprob]) -> None:
        """Add the log-probabilities of an echoed prompt, whose first token has none."""
        prompt = self.choice.prompt
        (first,) = self._text.texts_of(prompt[:1], ())
        self.logprobs.append(TextLogprob(first, None))
        self._offset = len(first)
        for place, each in enumerate(found, 1):
            self._note(each, prompt[max(0, place - ECHOED) : place])

    async def read_all(self) -> list[Piece]:
        return [piece async for pieces, _ in self.read() for piece in pieces]

    def take_logprobs(self) -> list[TextLogprob]:
        """Return the log-probabilities since the last call."""
        taken, self.logprobs = self.logprobs, []
        return taken

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancel the request. Only the reason of the first call is counted."""
        self._service.cancel(self._ticket, reason)


async def read_all(answers: Sequence[RunningAnswer]) -> list[list[Piece]]:
    """Read all answers to their end."""
    return await asyncio.gather(*(each.read_all() for each in answers))


async def read_into(news: asyncio.Queue[Any], answer: RunningAnswer) -> None:
    """Put the parts of an answer, or the error that ends it, into ``news``."""
    try:
        async for pieces, last in answer.read():
            news.put_nowait((answer, pieces, last))
    except Exception as problem:
        news.put_nowait(problem)


def usage_of(sequences: Sequence[RunningAnswer]) -> dict[str, int]:
    prompts = {id(each.choice.prompt): len(each.choice.prompt) for each in sequences}
    return protocol.usage(sum(prompts.values()), sum(each.new_tokens for each in sequences))
