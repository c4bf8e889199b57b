"""Scheduling without a model: a stand-in chooses the next token from all tokens before it."""

from __future__ import annotations

import random
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
    """Contents of each slot of the cache: the tokens up to its own. Forwards check what they read."""

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


def first_forward(forwards: list[list[Chunk]], wanted: Request) -> int:
    """The number of the forward after which the request has its first token."""
    last = len(wanted.prompt)
    return next(
        at
        for at, chunks in enumerate(forwards)
        if any(chunk.request is wanted and chunk.start + chunk.count == last for chunk in chunks)
    )


def test_long_prompts_are_cut_and_short_ones_fill_the_budget() -> None:
    plan = scheduler(short_share=0.0)
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


def test_a_short_prompt_behind_long_ones_has_the_next_forward() -> None:
    def after(share: float) -> int:
        plan = scheduler(num_blocks=200, short_share=share)
        short = request(2, 14)
        forwards = finish(plan, {0: [request(0, 160), request(1, 160)], 5: [short]})
        assert short.tokens == generate(list(short.prompt), 4)
        assert plan.counts.overtaking_tokens == (14 if share else 0)
        return first_forward(forwards, short) - 5

    assert after(0.5) == 0
    assert after(0.0) == 16  # the long ones take 20 forwards, and it comes before the sixth


def test_many_short_prompts_do_not_starve_a_long_one() -> None:
    plan = scheduler(num_blocks=400, token_budget=32, max_sequences=32)
    long = request(0, 320, new=1)
    arriving = {0: [long]}
    for at in range(60):  # together more than a forward has room for, for as long as the long one takes
        arriving.setdefault(at, []).extend(request(1 + 4 * at + i, 10, new=1) for i in range(4))
    forwards = finish(plan, arriving)
    computed = [sum(chunk.count for chunk in chunks if chunk.request is long) for chunks in forwards]
    taken = first_forward(forwards, long) + 1
    assert taken <= 320 / 16 + 2  # half of the budget, but for the bucket's one budget at the start
    for begin in range(taken):
        for end in range(begin + 1, taken):
            assert sum(computed[begin:end]) >= 16 * (end - begin) - 32
    assert all(sum(chunk.count for chunk in chunks) == 32 for chunks in forwards[:taken])
    shorts = [each for each in arriving[0] if each is not long]
    assert max(first_forward(forwards, each) for each in shorts) <= 2


def test_prompts_that_are_begun_do_not_pass_one_that_waits() -> None:
    """Shorts that did not fit into one forward go on in the next: that too is paid for."""
    plan = scheduler(num_blocks=4000, token_budget=64, max_sequences=64)
    long = request(0, 640, new=1)
    arriving = {at: [request(1 + at, 100, new=1)] for at in range(60)}
    arriving[0].insert(0, long)
    forwards = finish(plan, arriving)
    assert first_forward(forwards, long) + 1 <= 640 / 32 + 2


def test_only_much_shorter_prompts_overtake() -> None:
    plan = scheduler(num_blocks=200)
    requests = [request(0, 64), request(1, 17), request(2, 16)]
    for each in requests:
        plan.add(each)
    forwards = finish(plan)
    assert [(chunk.request.id, chunk.count) for chunk in forwards[0]] == [(2, 16)]
    assert [first_forward(forwards, each) for each in requests[:2]] == [5, 6]


def test_nobody_overtakes_into_what_the_first_needs() -> None:
    """A cache of 32 blocks of 4, of which one request keeps 16 for some time: the next one waits for them."""
    plan = scheduler(num_blocks=32, token_budget=64)
    holding, long = request(0, 61, new=3), request(1, 80, new=1)
    shorts = [request(2 + i, 8, new=1) for i in range(8)]
    forwards = finish(plan, {0: [holding], 1: [long, *shorts]})
    assert [chunk.request for chunk in forwards[1]] == [holding] == [chunk.request for chunk in forwards[2]]
    assert [chunk.request for chunk in forwards[3]] == [
        *shorts[:4],
        long,
    ]  # a fifth would leave it too few blocks
    assert plan.counts.preemptions == 0


def test_overtaking_leaves_a_place_for_the_first() -> None:
    plan = scheduler(num_blocks=200, max_sequences=2)
    holding, long, short = request(0, 4, new=6), request(1, 80), request(2, 8)
    forwards = finish(plan, {0: [holding, long], 3: [short]})
    assert first_forward(forwards, long) == 5 and first_forward(forwards, short) > 5
    assert plan.counts.overtaking_tokens == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("num_blocks", [60, 80, 400])
def test_mixed_requests_get_the_same_tokens_in_any_order(share: float, num_blocks: int) -> None:
    """With common beginnings, preemptions and arrivals at any time; with a large cache no forward is short."""
    draw = random.Random(5)
    plan = scheduler(num_blocks=num_blocks, token_budget=24, max_sequences=12, short_share=share)
    common = list(range(9000, 9040))
    requests, arriving = [], {}
    for id in range(60):
        length, new = draw.choice([3, 8, 20, 120]), draw.choice([1, 5, 40])
        prompt = common[: draw.choice([0, 10, 40])] + [id * 1000 + i for i in range(length)]
        requests.append(Request(id, prompt, SamplingParams(max_new_tokens=new)))
        arriving.setdefault(id // 2, []).append(requests[-1])
    finish(plan, arriving)
    for each in requests:
        assert each.tokens == generate(list(each.prompt), each.params.max_new_tokens)
    assert plan.counts.shared_tokens > 0
    assert (plan.counts.overtaking_tokens > 0) == (share > 0)
    assert (plan.counts.preemptions > 0) == (num_blocks < 400)
    if num_blocks == 400:
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
    assert requests[0].preemptions == 0  # the first request is served first


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
    with pytest.raises(
        ValueError, match="request 0: 9 tokens and up to 4 new ones exceed the maximum sequence length of 10"
    ):
        plan.add(request(0, 9))
    with pytest.raises(ValueError, match="empty prompt"):
        request(1, 0)
    with pytest.raises(ValueError, match="max_sequences=8 with token_budget=4"):
        scheduler(token_budget=4)
    with pytest.raises(ValueError, match=r"short_share=1.0: must be in \[0, 1\)"):
        scheduler(short_share=1.0)
    with pytest.raises(ValueError, match="top_p=0"):
        SamplingParams(top_p=0)


def test_lower_priorities_are_served_first_where_the_queue_is_full() -> None:
    def order(policy: str) -> list[int]:
        plan = scheduler(max_sequences=1, policy=policy)
        later = [request(id, 5, priority=value) for id, value in ((1, 7), (2, 0), (3, -2), (4, 0), (5, -2))]
        running = request(0, 9, new=6, priority=9)
        forwards = finish(plan, {0: [running], 2: later})
        for each in [running, *later]:  # the one that runs keeps its place
            assert each.tokens == generate(list(each.prompt), each.params.max_new_tokens)
            assert each.preemptions == 0
        return sorted(range(6), key=lambda id: first_forward(forwards, [running, *later][id]))

    assert order("priority") == [0, 3, 5, 2, 4, 1]
    assert order("fcfs") == [0, 1, 2, 3, 4, 5]


def test_the_least_urgent_is_preempted() -> None:
    plan = scheduler(num_blocks=8, policy="priority")
    requests = [request(id, 4, new=16, priority=value) for id, value in enumerate((1, 0, -1))]
    finish(plan, {0: requests})
    assert requests[0].preemptions and not requests[2].preemptions
    for each in requests:
        assert each.tokens == generate(list(each.prompt), 16)


def test_a_short_prompt_does_not_overtake_a_more_urgent_one() -> None:
    def after(priority: int) -> int:
        plan = scheduler(num_blocks=200, policy="priority")
        short = request(2, 14, priority=priority)
        forwards = finish(plan, {0: [request(0, 160), request(1, 160)], 5: [short]})
        assert plan.counts.overtaking_tokens == (0 if priority else 14)
        return first_forward(forwards, short) - 5

    assert after(0) == 0 and after(-1) == 0
    assert after(1) == 16  # after all of the long ones, as without overtaking


def test_priorities_beside_arrivals_at_random() -> None:
    """In any order, all requests end with their own tokens."""
    draw = random.Random(3)
    for _ in range(20):
        plan = scheduler(num_blocks=20, max_sequences=6, policy="priority")
        made = [
            request(id, draw.randint(1, 40), draw.randint(1, 12), priority=draw.randint(-2, 2))
            for id in range(25)
        ]
        finish(plan, {at: [each] for at, each in enumerate(made)})
        for each in made:
            assert each.tokens == generate(list(each.prompt), each.params.max_new_tokens)


def test_policies_by_their_names() -> None:
    with pytest.raises(ValueError, match="policy='lifo' is not one of fcfs, priority"):
        scheduler(policy="lifo")
