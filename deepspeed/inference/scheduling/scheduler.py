"""Which tokens the next forward computes.

Dynamic SplitFuse (C. Holmes et al.: DeepSpeed-FastGen, 2024): each forward has the same number of tokens as far as work
is there. Every request that generates gets its one token first; what is left of the budget goes to prompts, the longest
of which are cut into chunks and the last of which fills the budget exactly. So a long prompt delays nobody's next token
by more than one forward of constant size.

Requests are served in the order of their arrival. One that finds no block for its next token takes those of the request
that arrived last (*preemption*), which starts anew later: with what it has generated, and with what of its blocks is
still in the cache.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepspeed.inference.cache.blocks import BlockManager
from deepspeed.inference.scheduling.requests import Chunk, Request, State


@dataclass(slots=True)
class Counts:
    """Of all forwards so far. ``full``: those with as many tokens as the budget; ``short``: those with fewer although
    requests were waiting (for blocks, or because of ``max_sequences``)."""

    forwards: int = 0
    tokens: int = 0
    full: int = 0
    short: int = 0
    preemptions: int = 0
    shared_tokens: int = 0


class Scheduler:
    """
    Args:
        blocks: of the cache; the scheduler alone changes the tables of its requests.
        token_budget: tokens of one forward.
        max_sequences: requests that have blocks at the same time; at most ``token_budget``.
        max_length: tokens of the longest request, prompt included; None: what the cache holds.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        token_budget: int = 512,
        max_sequences: int = 64,
        max_length: int | None = None,
    ) -> None:
        if not 1 <= max_sequences <= token_budget:
            raise ValueError(
                f"max_sequences={max_sequences} with token_budget={token_budget}: every sequence needs its token in "
                "each forward, so that max_sequences is 1 to token_budget"
            )
        self.blocks = blocks
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self.max_length = min(blocks.capacity, max_length or blocks.capacity)
        self.counts = Counts()
        self._running: list[tuple[int, Request]] = []  # by id, which is the order of arrival
        self._waiting: list[tuple[int, Request]] = []  # likewise

    @property
    def running(self) -> list[Request]:
        return [request for _, request in self._running]

    @property
    def waiting(self) -> list[Request]:
        return [request for _, request in self._waiting]

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def check(self, request: Request) -> None:
        """ValueError: it would become longer than is possible."""
        if request.limit > self.max_length:
            raise ValueError(
                f"request {request.id}: {len(request.prompt)} tokens and up to {request.params.max_new_tokens} new "
                f"ones are more than the {self.max_length} that a sequence may have here"
            )

    def add(self, request: Request) -> None:
        """ValueError: it would become longer than is possible, or ids do not ascend."""
        self.check(request)
        if self._waiting and self._waiting[-1][0] >= request.id:
            raise ValueError(f"request {request.id} after request {self._waiting[-1][0]}: ids ascend")
        self._waiting.append((request.id, request))

    def cancel(self, request: Request) -> None:
        """It gets no further tokens. Nothing happens if it is finished."""
        if request.state is not State.FINISHED:
            self._finish(request, "cancelled")

    def schedule(self) -> list[Chunk]:
        """The chunks of the next forward, at most ``token_budget`` tokens; empty only without work. Their blocks are
        reserved. ``complete`` has to follow before the next call."""
        chunks = list(self._generating())
        budget = self.token_budget - len(chunks)
        chunks += self._prompts(budget)
        while not chunks and len(self._running) > 1:  # prompts hold all blocks and none can go on
            self._preempt(self._running[-1][1])
            chunks = self._prompts(budget)
        used = sum(chunk.count for chunk in chunks)
        self._count(chunks, used)
        return chunks

    def complete(self, chunks: Sequence[Chunk], tokens: Mapping[int, int]) -> list[Request]:
        """The forward of ``chunks`` is done; ``tokens``: for each request (by id) of a last chunk, the next one.
        Returns those that are finished."""
        finished = []
        for chunk in chunks:
            request = chunk.request
            if request.state is State.FINISHED:  # cancelled during the forward
                continue
            last = chunk.is_last
            request.computed = chunk.start + chunk.count
            self.blocks.publish(request.table, request.tokens, request.computed)
            if last:
                request.tokens.append(tokens[request.id])
                reason = _reason(request)
                if reason is not None:
                    self._finish(request, reason)
                    finished.append(request)
        return finished

    # -------------------------------------------------------------------------------------- parts of schedule

    def _generating(self) -> Iterator[Chunk]:
        """One token each. Those that are preempted for it come later in the order, and are not scheduled yet."""
        for request in self.running:
            if request.state is State.RUNNING and request.pending == 1 and self._make_room(request):
                yield Chunk(request, request.computed, 1)

    def _make_room(self, request: Request) -> bool:
        """For one token, by preemption where needed. False: it was preempted itself."""
        while not self.blocks.reserve(request.table, request.computed + 1):
            victim = self._running[-1][1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _prompts(self, budget: int) -> list[Chunk]:
        chunks = []
        for request in self.running:
            if request.pending > 1 and budget:
                chunk = self._chunk(request, budget)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= chunk.count
        while budget and self._waiting and len(self._running) < self.max_sequences:
            request = self._waiting[0][1]
            if not self._admit(request):
                break
            chunk = self._chunk(request, budget)
            assert chunk is not None, "a request is admitted only with blocks for all of its tokens"
            chunks.append(chunk)
            budget -= chunk.count
        return chunks

    def _chunk(self, request: Request, budget: int) -> Chunk | None:
        start = request.computed
        count = min(request.pending, budget, self.blocks.room(request.table) - start)
        if count < 1 or not self.blocks.reserve(request.table, start + count):
            return None
        return Chunk(request, start, count)

    def _admit(self, request: Request) -> bool:
        """If all its known tokens have room now, and everyone who runs has room for one block more: what is begun shall
        neither stop half-way nor be preempted at once."""
        needed = self.blocks.blocks_for(len(request.tokens)) - self.blocks.found_in_use(request.tokens)
        if needed + len(self._running) > self.blocks.pool.num_free:
            return False
        del self._waiting[0]
        request.shared = request.computed = self.blocks.adopt(request.table, request.tokens)
        self.counts.shared_tokens += request.shared
        request.state = State.RUNNING
        insort(self._running, (request.id, request), key=_order)
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.computed = 0
        request.state = State.WAITING
        request.preemptions += 1
        self.counts.preemptions += 1
        insort(self._waiting, (request.id, request), key=_order)

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            self._waiting.remove((request.id, request))
        request.state, request.reason = State.FINISHED, reason

    def _leave(self, request: Request) -> None:
        self._running.remove((request.id, request))
        self.blocks.release(request.table)

    def _count(self, chunks: Sequence[Chunk], used: int) -> None:
        if not chunks:
            return
        counts = self.counts
        counts.forwards += 1
        counts.tokens += used
        if used == self.token_budget:
            counts.full += 1
        elif self._waiting:
            counts.short += 1


def _order(entry: tuple[int, Request]) -> int:
    return entry[0]


def _reason(request: Request) -> str | None:
    """Why the request ends with its last token."""
    params, generated = request.params, len(request.tokens) - len(request.prompt)
    if request.tokens[-1] in params.stop_token_ids:
        return "stop"
    return "length" if generated >= params.max_new_tokens else None
