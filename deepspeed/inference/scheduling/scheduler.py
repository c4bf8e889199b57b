"""Scheduler: chooses the tokens that the next forward computes.

Dynamic SplitFuse (C. Holmes et al.: DeepSpeed-FastGen, 2024): every forward has the same number of tokens while there
is enough work. Each decoding request gets its one token first; the rest of the budget goes to prompts, which are cut
into chunks so that the last one fills the budget exactly. A long prompt therefore delays a decoding request by at most
one forward of constant size per token.

Prompts are served in arrival order, except that prompts *much shorter* than an earlier one overtake it, so that they
need not wait for all of a long one. A token bucket bounds what they take: the fraction ``short_share`` of each prefill
budget is added to the bucket, which holds at most one budget, and overtaking prompts draw on it. Over any number of
forwards, overtaken prompts get at least the rest of the prefill budget less one budget, so none starves; a single
short prompt usually finds the bucket full, and is computed in one forward. An overtaking prompt never takes the blocks,
or the place among ``max_sequences``, that the first waiting request needs.

A request that finds no block for its next token preempts the latest arrival (*preemption*) and takes its blocks. The
preempted request is recomputed later, from the tokens generated so far and the blocks left in the prefix cache.

With `speculation.py`, draft tokens fill what is left of the forward and the cache: they delay no prompt and preempt no
request.

With the policy "priority", each of these orders is by ``priority`` value, lowest first, then by arrival. Prompts thus
overtake only prompts of their own value, the highest value is preempted first, and it may starve while more urgent
requests keep coming. A running request is not preempted for a more urgent waiting one.
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
"""Prompts overtake those with at least this many times their remaining tokens: it delays a long prompt by little of its
own time. Prompts of similar length are not interleaved, which would delay the first and speed up neither."""

_MAX_DRAFT_BACKOFF = 15
"""Longest backoff: after rejected proposals a request gets none for 1, 3, 7, then at most 15 forwards, so that text
with little repetition costs little."""


@dataclass(slots=True)
class SchedulerCounts:
    """Counts over all forwards. ``full``: forwards that fill the budget; ``short``: those that do not although requests
    wait (for blocks or for ``max_sequences``). ``looked_up_tokens``: tokens of admitted sequences, of which the prefix
    cache had ``shared_tokens``. ``overtaking_tokens``: computed for short prompts ahead of their arrival order.
    ``drafts``: chunks with draft tokens; there were ``proposed_tokens``, of which ``accepted_tokens`` were kept."""

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
        blocks: block manager of the cache; only the scheduler changes the tables of its requests.
        token_budget: most tokens per forward.
        max_sequences: most requests that hold blocks at a time; at most ``token_budget``.
        max_length: longest request in tokens, prompt included; None: what the cache holds.
        short_share: fraction of the prefill budget with which short prompts may overtake long ones, 0 to below 1; 0:
            strict arrival order.
        policy: "fcfs": by arrival; "priority": by ``SamplingParams.priority``, then by arrival.
        speculation: proposes draft tokens for the rest of a forward; None: no speculation.
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
                f"max_sequences={max_sequences} with token_budget={token_budget}: every sequence needs a "
                "token in each forward, so max_sequences must be 1 to token_budget"
            )
        if not 0 <= short_share < 1:
            raise ValueError(
                f"short_share={short_share}: must be in [0, 1): with the whole budget, short prompts could "
                "starve a long one"
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
        self.running: list[Request] = []  # in scheduling order
        self.waiting: list[Request] = []  # likewise
        self._last_id = -1

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def check(self, request: Request) -> None:
        """Raise ValueError if ``request`` could exceed the longest possible length."""
        if request.limit > self.max_length:
            raise ValueError(
                f"request {request.id}: {len(request.prompt)} tokens and up to {request.params.max_new_tokens} new "
                f"ones exceed the maximum sequence length of {self.max_length}"
            )

    def add(self, request: Request) -> None:
        """Enqueue ``request``. ValueError: it could exceed the longest possible length, or ids do not ascend."""
        self.check(request)
        if request.id <= self._last_id:
            raise ValueError(f"request {request.id} after request {self._last_id}: ids must ascend")
        self._last_id = request.id
        insort(self.waiting, request, key=self._sort_key)

    def cancel(self, request: Request) -> None:
        """Finish ``request`` without further tokens; no-op if it is finished. ValueError: it was never added."""
        if request.state is not State.FINISHED:
            self._finish(request, "cancelled")

    def schedule(self, max_with_drafts: int | None = None) -> list[Chunk]:
        """Return the chunks of the next forward, at most ``token_budget`` tokens, and reserve their blocks; empty only
        without work. Call ``complete`` before the next call. ``max_with_drafts``: size up to which draft tokens may
        fill the forward; None: the budget."""
        self._restart_grown()
        chunks = list(self._decode_chunks())
        budget = self.token_budget - len(chunks)
        self._credit = min(self._credit + budget * self.short_share, float(self.token_budget))
        chunks += self._prefill_chunks(budget)
        while not chunks and len(self.running) > 1:  # prompts hold all blocks and none can make progress
            self._preempt(self.running[-1])
            chunks = self._prefill_chunks(budget)
        if self.speculation is not None:
            most = self.token_budget if max_with_drafts is None else min(max_with_drafts, self.token_budget)
            self._propose(self.speculation, chunks, most)
        used = sum(chunk.size for chunk in chunks)
        self._count(chunks, used)
        return chunks

    def complete(self, chunks: Sequence[Chunk], tokens: Mapping[int, int]) -> list[Request]:
        """Record the finished forward of ``chunks``. ``tokens``: by id of each request whose last chunk was in it, the
        next token, after the accepted draft tokens. Return the finished requests."""
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
        """Restart requests whose RoPE frequencies change at their new length (longrope), to recompute them."""
        for request in list(self.running):
            if self.blocks.span(len(request.tokens)) != request.table.span:
                self._restart(request)

    def _decode_chunks(self) -> Iterator[Chunk]:
        """Yield one token per decoding request. Preemption takes later ones, which have not been yielded yet."""
        for request in list(self.running):
            if request.state is State.RUNNING and request.pending == 1 and self._make_room(request):
                yield Chunk(request, request.computed, 1)

    def _propose(self, speculation: Proposer, chunks: Sequence[Chunk], most: int) -> None:
        """Add draft tokens to the last chunks of requests, up to ``most`` tokens in total, where blocks are free."""
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
        room = self.blocks.room(request.table) - known  # other requests' drafts may have taken blocks
        tokens = tokens[: max(0, room)]
        # Beyond a length where rotations change, they would be computed differently than they were proposed.
        if not tokens or self.blocks.span(known + len(tokens)) != request.table.span:
            return
        self.blocks.reserve(request.table, known + len(tokens))
        chunk.proposed = tokens
        self.counts.drafts += 1
        self.counts.proposed_tokens += len(tokens)

    def _make_room(self, request: Request) -> bool:
        """Reserve room for one more token, by preemption if needed. Return False if ``request`` was preempted."""
        while not self.blocks.reserve(request.table, request.computed + 1):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _prefill_chunks(self, budget: int) -> list[Chunk]:
        """Schedule prompts in order, each after the prompts that overtake it. One chunk per request: when the turn of
        a prompt that overtook comes, a longer chunk replaces its first one."""
        prompts = [request for request in self.running if request.pending > 1]
        if len(self.running) < self.max_sequences:  # otherwise no waiting request can be admitted
            prompts += self.waiting
        prompts.sort(key=self._sort_key)
        shortest: defaultdict[int, deque[Request]] = defaultdict(deque)  # by priority
        for request in sorted(prompts, key=_length):
            shortest[self._priority(request)].append(request)
        chunks: dict[int, Chunk] = {}
        blocked = False  # a request waits for blocks: later ones must leave it the blocks that are freed
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
        """Schedule prompts that overtake ``request``, shortest first, and return their number of tokens. ``shortest``:
        the prompts of its priority not considered yet."""
        taken = 0
        while shortest and shortest[0].pending * _MUCH_SHORTER <= request.pending:
            allowed = min(budget - taken, int(self._credit))
            if not allowed:
                break
            early = shortest.popleft()
            if early.id in chunks:  # scheduled in its own turn
                continue
            count = self._serve(early, allowed, chunks)
            if early.state is State.WAITING:
                break  # those that follow are longer and need no fewer blocks
            taken += count
            self._credit -= count
            self.counts.overtaking_tokens += count
        return taken

    def _serve(self, request: Request, budget: int, chunks: dict[int, Chunk]) -> int:
        """Add up to ``budget`` tokens of ``request`` to this forward, extending its chunk if it has one, and admit it
        if needed. Return how many were added."""
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
        """Admit ``request`` if the pool has blocks for all of its tokens, all tokens of the running requests, and one
        more block for each of these: otherwise one would be preempted at once. An overtaking request also leaves room
        for the first waiting one. Return whether it was admitted."""
        coming = [request]
        if self.waiting[0] is not request:
            coming.append(self.waiting[0])
        running = len(self.running) + len(coming) - 1
        if running >= self.max_sequences:
            return False
        needed = sum(self._needed(each) for each in coming)
        promised = sum(self.blocks.missing(each.table, len(each.tokens)) for each in self.running)
        if needed + promised + running > self.blocks.pool.num_free:
            return False
        self.waiting.remove(request)
        request.shared = request.computed = self.blocks.match_prefix(
            request.table, request.tokens, share=not request.computes_prompt
        )
        self.counts.looked_up_tokens += len(request.tokens)
        self.counts.shared_tokens += request.shared
        request.state = State.RUNNING
        insort(self.running, request, key=self._sort_key)
        return True

    def _needed(self, request: Request) -> int:
        """Return the number of free blocks that admitting ``request`` would take."""
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
        insort(self.waiting, request, key=self._sort_key)

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.state, request.reason = State.FINISHED, reason

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
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
        elif self.waiting:
            counts.short += 1


def _length(request: Request) -> tuple[int, int]:
    """Return the sort key: tokens left to compute, then order of arrival."""
    return request.pending, request.id


def _finish_reason(request: Request) -> str | None:
    """Return why the request ends with its last token; None: it does not."""
    params, generated = request.params, len(request.tokens) - len(request.prompt)
    if request.cut is not None:
        return request.cut
    if generated and request.tokens[-1] in params.stop_token_ids:
        return "stop"
    return "length" if generated >= params.max_new_tokens else None
