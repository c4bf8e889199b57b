"""Scheduling without a model: a stand-in chooses the next token from all tokens before it."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.inference.cache.blocks import BlockManager, BlockPool
from deepspeed.inference.scheduling.requests import Chunk, Request, SamplingParams, State
from deepspeed.inference.scheduling.scheduler import Scheduler


def scheduler(num_blocks: int = 64, block_size: int = 4, **more: Any) -> Scheduler:
    settings = {"token_budget": 16, "max_sequences": 8, **more}
    return Scheduler(BlockManager(BlockPool(num_blocks), block_size), **settings)


def request(id: int, length: int, new: int = 4, **params: Any) -> Request:
    return Request(id, [id * 100 + i for i in range(length)], SamplingParams(max_new_tokens=new, **params))


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 1000


def generate(prompt: list[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens))
    return tokens


class Cache:
    """What each slot of the cache holds: the tokens up to its own. Forwards check what they read."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, chunks: list[Chunk]) -> dict[int, int]:
        for chunk in chunks:
            tokens = chunk.request.tokens
            for at in range(chunk.start, chunk.start + chunk.count):
                self.slots[self._slot(chunk.request, at)] = tuple(tokens[: at + 1])
        out = {}
        for chunk in chunks:
            tokens = chunk.request.tokens
            for at in range(chunk.start + chunk.count):
                assert self.slots[self._slot(chunk.request, at)] == tuple(tokens[: at + 1])
            if chunk.is_last:
                out[chunk.request.id] = next_token(tokens)
        return out

    def _slot(self, request: Request, at: int) -> tuple[int, int]:
        return request.table.blocks[at // self.size], at % self.size


def finish(plan: Scheduler, arriving: dict[int, list[Request]] | None = None) -> list[list[Chunk]]:
    """All forwards until nothing is left; ``arriving``: by number of the forward before which they come."""
    cache = Cache(plan.blocks.block_size)
    arriving = dict(arriving or {})
    forwards = []
    while plan.has_work or arriving:
        for each in arriving.pop(len(forwards), []):
            plan.add(each)
        chunks = plan.schedule()
        assert chunks and sum(chunk.count for chunk in chunks) <= plan.token_budget
        forwards.append(chunks)
        plan.complete(chunks, cache.run(chunks))
        assert len(forwards) < 1000
    assert plan.blocks.pool.num_free == plan.blocks.pool.num_blocks
    return forwards


def test_long_prompts_are_cut_and_short_ones_fill_the_budget() -> None:
    plan = scheduler()
    requests = [request(0, 40), request(1, 5), request(2, 6)]
    for each in requests:
        plan.add(each)
    forwards = finish(plan)
    cut = [[(chunk.request.id, chunk.start, chunk.count) for chunk in chunks] for chunks in forwards[:4]]
    assert cut == [
        [(0, 0, 16)],
        [(0, 16, 16)],
        [(0, 32, 8), (1, 0, 5), (2, 0, 3)],
        [(0, 40, 1), (1, 5, 1), (2, 3, 3)],
    ]
    for each in requests:
        assert each.tokens == generate(list(each.prompt), 4) and each.reason == "length"
    assert (plan.counts.full, plan.counts.short, plan.counts.preemptions) == (3, 0, 0)


def test_a_long_prompt_does_not_delay_those_who_generate() -> None:
    plan = scheduler()
    first = request(0, 4, new=12)
    plan.add(first)
    forwards = finish(plan, {3: [request(1, 100)]})
    with_first = [chunks for chunks in forwards if any(chunk.request is first for chunk in chunks)]
    assert with_first == forwards[:12]  # in every forward, though the prompt takes seven of them
    assert sum(chunk.count for chunk in forwards[3]) == 16


def test_the_budget_is_full_while_requests_wait() -> None:
    plan = scheduler(num_blocks=400, token_budget=32, max_sequences=32)
    for id in range(60):
        plan.add(request(id, 7 + 13 * id % 50, new=1 + id % 9))
    finish(plan)
    assert plan.counts.full >= 0.98 * (plan.counts.full + plan.counts.short)


@pytest.mark.parametrize("num_blocks", [8, 9, 12, 20])
def test_preempted_requests_get_the_same_tokens(num_blocks: int) -> None:
    plan = scheduler(num_blocks=num_blocks)
    requests = [request(id, 6 + id, new=14) for id in range(5)]
    for each in requests:
        plan.add(each)
    finish(plan)
    assert plan.counts.preemptions > 0
    for each in requests:
        assert each.tokens == generate(list(each.prompt), 14)
    assert requests[0].preemptions == 0  # whoever came first is served first


def test_a_common_beginning_is_computed_once() -> None:
    plan = scheduler(num_blocks=64)
    common = list(range(5000, 5020))
    requests = [Request(id, [*common, id, id + 1], SamplingParams(max_new_tokens=3)) for id in range(4)]
    forwards = finish(plan, {0: requests[:1], 4: requests[1:]})
    computed = sum(chunk.count for chunks in forwards for chunk in chunks)
    assert [each.shared for each in requests] == [0, 20, 20, 20]
    assert computed == 24 + 3 * (2 + 2)
    for each in requests:
        assert each.tokens == generate(list(each.prompt), 3)


def test_stop_tokens_end_a_request() -> None:
    plan = scheduler()
    expected = generate([7, 8, 9], 5)
    stopped = Request(0, [7, 8, 9], SamplingParams(max_new_tokens=5, stop_token_ids=(expected[4],)))
    plan.add(stopped)
    finish(plan)
    assert (stopped.generated, stopped.reason) == (expected[3:5], "stop")


def test_cancelled_requests_leave_at_once() -> None:
    plan = scheduler()
    running, waiting = request(0, 20), request(1, 20)
    plan.add(running)
    plan.add(waiting)
    chunks = plan.schedule()
    plan.cancel(running)  # while the forward runs
    plan.cancel(waiting)
    plan.complete(chunks, {})
    assert running.state is waiting.state is State.FINISHED and running.reason == "cancelled"
    assert not plan.has_work and plan.blocks.pool.num_free == 64
    plan.cancel(running)


def test_what_cannot_be_served_is_refused() -> None:
    plan = scheduler(num_blocks=4, max_length=10)
    with pytest.raises(ValueError, match="request 0: 9 tokens and up to 4 new ones are more than the 10"):
        plan.add(request(0, 9))
    with pytest.raises(ValueError, match="empty prompt"):
        request(1, 0)
    with pytest.raises(ValueError, match="max_sequences=8 with token_budget=4"):
        scheduler(token_budget=4)
    with pytest.raises(ValueError, match="top_p=0"):
        SamplingParams(top_p=0)
