"""Scheduler of tokens: chooses those that the next forward computes.

Dynamic SplitFuse (C. Holmes et al.: DeepSpeed-FastGen, 2024): each forward has the same number of tokens as far as work
is there. Every request that generates gets its one token first; what is left of the budget goes to prompts, the longest
of which are cut into chunks and the last of which fills the budget exactly. So a long prompt delays nobody's next token
by more than one forward of constant size.

Prompts are served in the order of their arrival, but for those that are *much shorter* than one before them: they go
first, so that a short prompt does not wait for all of a long one. What they take is bounded by a token bucket: of what
the budgets leave for prompts, a part ``short_share`` is put into the bucket, which holds no more than one budget, and
who overtakes pays from it. Over any number of forwards, those who are overtaken get the other part but for one budget,
so nobody starves; a single short prompt mostly finds the bucket full, and has a forward of its own. Nobody overtakes
into the blocks, or the place among ``max_sequences``, that the first of those that wait needs.

A request that finds no block for its next token takes those of the request that arrived last (*preemption*), which
starts anew later: with what it has generated, and with what of its blocks is still in the cache.

With `speculation.py`, proposed tokens fill what a forward and the cache have left then: they delay no prompt and
preempt nobody.

With the policy "priority", requests of a lower ``priority`` value come before all of a higher one in each of these
orders, and those of one value by their arrival. So prompts overtake only those of their own value, those of the highest
value are preempted first, and while more urgent ones keep coming they wait without bound. A request that runs does not
lose its place to a more urgent one that waits.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepspeed.inference.cache.blocks import BlockManager
from deepspeed.inference.scheduling.requests import Chunk, Request, State
from deepspeed.inference.scheduling.speculation import Proposer

POLICIES = ("fcfs", "priority")

_MUCH_SHORTER = 4
"""A prompt overtakes those that have so many times as many tokens left: who is overtaken is late by a small part of
what it takes anyway, and two prompts of about one length are not computed side by side, which would delay the first and
help neither."""

_MAX_DRAFT_BACKOFF = 15
"""After proposals in vain a request goes without for 1, 3, 7 and at most 15 forwards: where little repeats, what is
rejected then costs little."""


@dataclass(slots=True)
class SchedulerCounts:
    """Counts of all forwards so far. ``full``: those with as many tokens as the budget; ``short``: those with fewer
    although requests were waiting (for blocks, or because of ``max_sequences``). ``looked_up_tokens``: those that
    sequences had when they were started, of which the prefix cache had ``shared_tokens``. ``overtaking_tokens``: of
    short prompts, before the turn that their arrival gave them. ``drafts``: of one or more of the
    ``proposed_tokens``, of which ``accepted_tokens`` were kept."""

    forwards: int = 0
    tokens: int = 0
    full: int = 0
    short: int = 0
    preemptions: int = 0
    looked_up_tokens: int = 0
    shared_tokens: int = 0
    overtaking_tokens: int = 0
    drafts: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


class Scheduler:
    """Chooses the tokens of each forward, and reserves their blocks.

    Args:
        blocks: of the cache; the scheduler alone changes the tables of its requests.
        token_budget: tokens of one forward.
        max_sequences: requests that have blocks at the same time; at most ``token_budget``.
        max_length: tokens of the longest request, prompt included; None: what the cache holds.
        short_share: the part of what is left for prompts with which short ones may overtake long ones, 0 to below 1; 0:
            strictly in the order of arrival.
        policy: "fcfs": by arrival; "priority": by ``SamplingParams.priority``, then by arrival.
        speculation: proposes tokens for what a forward has left; None: nobody does.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        token_budget: int = 512,
        max_sequences: int = 64,
        max_length: int | None = None,
        short_share: float = 0.5,
        policy: str = "fcfs",
        speculation: Proposer | None = None,
    ) -> None:
        if not 1 <= max_sequences <= token_budget:
            raise ValueError(
                f"max_sequences={max_sequences} with token_budget={token_budget}: every sequence needs its token in "
                "each forward, so that max_sequences is 1 to token_budget"
            )
        if not 0 <= short_share < 1:
            raise ValueError(
                f"short_share={short_share}: short prompts may have a part from 0 to below 1 of what is left for "
                "prompts; with all of it they could hold up a long one for ever"
            )
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is not one of {', '.join(POLICIES)}")
        self.blocks = blocks
        self.policy = policy
        self.speculation = speculation
        self.token_budget = token_budget
        self.short_share = short_share
        self.max_sequences = max_sequences
        self.max_length = min(blocks.capacity, max_length or blocks.capacity)
        self.counts = SchedulerCounts()
        self._credit = float(token_budget) if short_share else 0.0  # tokens in the bucket
        self._running: list[Request] = []  # in scheduling order
        self._waiting: list[Request] = []  # likewise
        self._last_id = -1

    @property
    def running(self) -> list[Request]:
        return list(self._running)

    @property
    def waiting(self) -> list[Request]:
        return list(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def check(self, request: Request) -> None:
        """Raise ValueError if ``request`` could become longer than is possible."""
        if request.limit > self.max_length:
            raise ValueError(
                f"request {request.id}: {len(request.prompt)} tokens and up to {request.params.max_new_tokens} new "
                f"ones are more than the {self.max_length} that a sequence may have here"
            )

    def add(self, request: Request) -> None:
        """Let ``request`` wait. ValueError: it could become longer than is possible, or ids do not ascend."""
        self.check(request)
        if request.id <= self._last_id:
            raise ValueError(f"request {request.id} after request {self._last_id}: ids ascend")
        self._last_id = request.id
        insort(self._waiting, request, key=self._sort_key)

    def cancel(self, request: Request) -> None:
        """Give ``request`` no further tokens; does nothing if it is finished. ValueError: it was never added."""
        if request.state is not State.FINISHED:
            self._finish(request, "cancelled")

    def schedule(self, max_with_drafts: int | None = None) -> list[Chunk]:
        """Return the chunks of the next forward, at most ``token_budget`` tokens, and reserve their blocks; empty only
        without work. ``complete`` has to follow before the next call. ``max_with_drafts``: a forward is
        filled up with draft tokens only to this many; None: to the budget."""
        self._restart_grown()
        chunks = list(self._decode_chunks())
        budget = self.token_budget - len(chunks)
        self._credit = min(self._credit + budget * self.short_share, float(self.token_budget))
        chunks += self._prefill_chunks(budget)
        while not chunks and len(self._running) > 1:  # prompts hold all blocks and none can go on
            self._preempt(self._running[-1])
            chunks = self._prefill_chunks(budget)
        if self.speculation is not None:
            most = self.token_budget if max_with_drafts is None else min(max_with_drafts, self.token_budget)
            self._propose(self.speculation, chunks, most)
        used = sum(chunk.size for chunk in chunks)
        self._count(chunks, used)
        return chunks

    def complete(self, chunks: Sequence[Chunk], tokens: Mapping[int, int]) -> list[Request]:
        """Record that the forward of ``chunks`` is done. ``tokens``: by id of each request with its last chunk in it,
        the next token, after those that the chunk accepted. Returns the requests that are finished."""
        finished = []
        for chunk in chunks:
            request = chunk.request
            if request.state is State.FINISHED:  # cancelled during the forward
                continue
            last = chunk.is_last
            request.computed = chunk.start + chunk.count + chunk.accepted
            if chunk.proposed:
                self.counts.accepted_tokens += chunk.accepted
                request.rejected_drafts = 0 if chunk.accepted else request.rejected_drafts + 1
                request.draft_backoff = min(2**request.rejected_drafts - 1, _MAX_DRAFT_BACKOFF)
            self.blocks.publish(request.table, request.tokens, request.computed)
            self.blocks.trim(request.table, len(request.tokens))
            if last:
                if request.id in tokens:
                    request.tokens.append(tokens[request.id])
                reason = _finish_reason(request)
                if reason is not None:
                    self._finish(request, reason)
                    finished.append(request)
        return finished

    # -------------------------------------------------------------------------------------- parts of schedule

    def _restart_grown(self) -> None:
        """Compute requests again whose RoPE frequencies change at their new length (dynamic and long-rope scaling)."""
        for request in self.running:
            if self.blocks.span(len(request.tokens)) != request.table.span:
                self._restart(request)

    def _decode_chunks(self) -> Iterator[Chunk]:
        """Yield one token for each that generates. Those preempted for it come later: they are not scheduled yet."""
        for request in self.running:
            if request.state is State.RUNNING and request.pending == 1 and self._make_room(request):
                yield Chunk(request, request.computed, 1)

    def _propose(self, speculation: Proposer, chunks: Sequence[Chunk], most: int) -> None:
        """Add proposed tokens to the last chunks of requests, up to ``most`` tokens in all, where blocks are free."""
        asked: list[tuple[Chunk, int]] = []
        for chunk in chunks:
            request, known = chunk.request, len(chunk.request.tokens)
            if not chunk.is_last or request.computes_prompt:
                continue
            if request.draft_backoff:
                request.draft_backoff -= 1
                continue
            room = min(request.limit - known - 1, self.blocks.room(request.table) - known)
            if room > 0:
                asked.append((chunk, room))
        left = most - sum(chunk.count for chunk in chunks)
        if not asked or left < 1:
            return
        found = speculation.propose([(chunk.request, room) for chunk, room in asked], left)
        for (chunk, _), tokens in zip(asked, found, strict=True):
            self._add_proposed(chunk, tokens)

    def _add_proposed(self, chunk: Chunk, tokens: Sequence[int]) -> None:
        request, known = chunk.request, len(chunk.request.tokens)
        room = self.blocks.room(request.table) - known  # others have taken blocks meanwhile
        tokens = tokens[: max(0, room)]
        # Past a length where rotations change, they would be computed otherwise than they are chosen.
        if not tokens or self.blocks.span(known + len(tokens)) != request.table.span:
            return
        self.blocks.reserve(request.table, known + len(tokens))
        chunk.proposed = tokens
        self.counts.drafts += 1
        self.counts.proposed_tokens += len(tokens)

    def _make_room(self, request: Request) -> bool:
        """Reserve room for one more token, by preemption where needed. Returns False if ``request`` was preempted."""
        while not self.blocks.reserve(request.table, request.computed + 1):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _prefill_chunks(self, budget: int) -> list[Chunk]:
        """Schedule prompts in their order, and before each those that overtake it. One chunk per request: a longer one
        replaces it where its own turn adds to what it overtook with."""
        prompts = [request for request in self._running if request.pending > 1]
        if len(self._running) < self.max_sequences:  # else none of those that wait can begin
            prompts += self._waiting
        prompts.sort(key=self._sort_key)
        shortest: defaultdict[int, deque[Request]] = defaultdict(deque)  # by priority
        for request in sorted(prompts, key=_length):
            shortest[self._priority(request)].append(request)
        chunks: dict[int, Chunk] = {}
        blocked = False  # one has to wait for blocks: those after it leave it what becomes free
        for request in prompts:
            if request.id in chunks and chunks[request.id].is_last:
                continue
            budget -= self._overtaking(request, shortest[self._priority(request)], budget, chunks)
            if not budget:
                break
            if blocked and request.state is State.WAITING:
                continue
            budget -= self._serve(request, budget, chunks)
            blocked = blocked or request.state is State.WAITING
        return list(chunks.values())

    def _overtaking(
        self, request: Request, shortest: deque[Request], budget: int, chunks: dict[int, Chunk]
    ) -> int:
        """Schedule prompts that overtake ``request``, the shortest first, and return their tokens. ``shortest``:
        those of its priority that have not been looked at."""
        taken = 0
        while shortest and shortest[0].pending * _MUCH_SHORTER <= request.pending:
            allowed = min(budget - taken, int(self._credit))
            if not allowed:
                break
            early = shortest.popleft()
            if early.id in chunks:  # by its own turn
                continue
            count = self._serve(early, allowed, chunks)
            if early.state is State.WAITING:
                break  # those that follow are longer and need no fewer blocks
            taken += count
            self._credit -= count
            self.counts.overtaking_tokens += count
        return taken

    def _serve(self, request: Request, budget: int, chunks: dict[int, Chunk]) -> int:
        """Add up to ``budget`` tokens to this forward, in place of the request's chunk so far, if it is started or can
        be. Returns how many."""
        if request.state is State.WAITING and not self._admit(request):
            return 0
        before = chunks[request.id].count if request.id in chunks else 0
        chunk = self._chunk(request, before + budget)
        if chunk is None:
            return 0
        chunks[request.id] = chunk
        return chunk.count - before

    def _chunk(self, request: Request, budget: int) -> Chunk | None:
        start = request.computed
        count = min(request.pending, budget, self.blocks.room(request.table) - start)
        if count < 1 or not self.blocks.reserve(request.table, start + count):
            return None
        return Chunk(request, start, count)

    def _admit(self, request: Request) -> bool:
        """Start ``request`` if the pool can hold all of its tokens, all tokens of the running requests, and one more
        block for each of these: otherwise one would be preempted at once. A request that overtakes also leaves room
        for the first waiting one. Returns whether it was started."""
        coming = [request]
        if self._waiting[0] is not request:
            coming.append(self._waiting[0])
        running = len(self._running) + len(coming) - 1
        if running >= self.max_sequences:
            return False
        needed = sum(self._needed(each) for each in coming)
        promised = sum(self.blocks.missing(each.table, len(each.tokens)) for each in self._running)
        if needed + promised + running > self.blocks.pool.num_free:
            return False
        self._waiting.remove(request)
        request.shared = request.computed = self.blocks.match_prefix(
            request.table, request.tokens, share=not request.computes_prompt
        )
        self.counts.looked_up_tokens += len(request.tokens)
        self.counts.shared_tokens += request.shared
        request.state = State.RUNNING
        insort(self._running, request, key=self._sort_key)
        return True

    def _needed(self, request: Request) -> int:
        """Return how many free blocks starting ``request`` would take."""
        shared = (
            0 if request.computes_prompt else self.blocks.found_in_use(request.tokens, request.table.adapter)
        )
        return self.blocks.blocks_for(len(request.tokens)) - shared

    def _preempt(self, request: Request) -> None:
        self._restart(request)
        request.preemptions += 1
        self.counts.preemptions += 1

    def _restart(self, request: Request) -> None:
        self._leave(request)
        request.computed = 0
        request.state = State.WAITING
        insort(self._waiting, request, key=self._sort_key)

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            self._waiting.remove(request)
        request.state, request.reason = State.FINISHED, reason

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self.blocks.release(request.table)
        if self.speculation is not None:
            self.speculation.forget(request)

    def _priority(self, request: Request) -> int:
        return request.params.priority if self.policy == "priority" else 0

    def _sort_key(self, request: Request) -> tuple[int, int]:
        """Return the sort key: priority, then order of arrival."""
        return self._priority(request), request.id

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


def _length(request: Request) -> tuple[int, int]:
    """Return the sort key: tokens left to compute, then order of arrival."""
    return request.pending, request.id


def _finish_reason(request: Request) -> str | None:
    """Return why the request ends with its last token; None: it does not."""
    params, generated = request.params, len(request.tokens) - len(request.prompt)
    if generated and request.tokens[-1] in params.stop_token_ids:
        return "stop"
    return "length" if generated >= params.max_new_tokens else None
