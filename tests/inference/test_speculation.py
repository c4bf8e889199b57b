"""Guesses of the next tokens, and their scheduling, without a model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deepspeed.inference.scheduling.requests import Chunk, Request, SamplingParams
from deepspeed.inference.scheduling.scheduler import Scheduler
from deepspeed.inference.scheduling.speculation import NgramProposer, SpeculativeConfig
from tests.inference.test_scheduler import Cache, scheduler

PERIOD = 7


def asked(id: int, prompt: list[int], new: int = 40, **params: Any) -> Request:
    return Request(id, prompt, SamplingParams(max_new_tokens=new, **params))


def proposed(prompt: list[int], most: int = 99, **settings: int) -> list[int]:
    proposer = NgramProposer(**{"count": 3, "longest": 3, "shortest": 2, **settings})
    return proposer.propose([(asked(0, prompt), most)], 99)[0]


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9]
    assert proposed([1, 2, 3, 4, 5, 9, 2, 3], most=2) == [4, 5]
    assert proposed([1, 2, 3, 4, 5, 9, 8, 3]) == []  # one token is too short
    assert proposed([1, 2, 3, 4, 5, 9, 8, 3], shortest=1) == [4, 5, 9]
    assert proposed([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]) == [7, 9, 2]  # the longest first
    assert proposed([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], longest=2) == [8, 1, 2]  # then the latest
    assert proposed([4, 5, 6, 5, 6]) == proposed([5, 6, 5, 6]) == [5, 6, 5]  # beyond the end
    assert proposed([5], shortest=1) == proposed([5, 5]) == []
    assert proposed([0x110000 - 1, 0xD800, 7] * 2) == [0x110000 - 1, 0xD800, 7]


def test_a_total_is_shared_by_requests() -> None:
    proposer = NgramProposer(3, 3, 2)
    given = [(asked(id, prompt), 9) for id, prompt in enumerate([[1, 2] * 3, [1, 2, 3], [4, 5] * 3])]
    assert proposer.propose(given, 4) == [[1, 2, 1], [], [4]]
    for request, _ in given:
        proposer.forget(request)
    assert not proposer._texts


def test_configs_by_their_names_in_vllm() -> None:
    of, ngram = SpeculativeConfig.of, '{"method": "ngram", "num_speculative_tokens": 4'
    assert of(ngram + ', "prompt_lookup_max": 5, "prompt_lookup_min": 2}') == SpeculativeConfig(
        "ngram", 4, None, 5, 2
    )
    assert of(ngram + "}") == SpeculativeConfig("ngram", 4, None, 5, 5)
    assert of(ngram + ', "prompt_lookup_max": 3}') == SpeculativeConfig("ngram", 4, None, 3, 3)
    for more in ("", ', "method": "draft_model"'):
        assert of(f'{{"model": "x", "num_speculative_tokens": 2{more}}}') == SpeculativeConfig(
            "draft_model", 2, "x"
        )
    for text, words in (
        ("ngram", "is not JSON"),
        ('{"method": "eagle", "num_speculative_tokens": 4}', "'eagle'; expected one of ngram, draft_model"),
        ("[]", "expected an object"),
        ('{"num_speculative_tokens": 4}', "None; expected one of ngram"),
        ('{"method": "ngram"}', "num_speculative_tokens is missing"),
        ('{"method": "ngram", "num_speculative_tokens": 2.5}', "not an integer"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "at least 1"),
        (
            '{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2, "prompt_lookup_min": 3}',
            "min <=",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 1, "model": "x"}', "'model' is not one of"),
        ('{"method": "draft_model", "num_speculative_tokens": 1}', "must be the folder"),
        ('{"model": "x", "num_speculative_tokens": 1, "prompt_lookup_max": 2}', "'prompt_lookup_max' is not"),
    ):
        with pytest.raises(ValueError, match=words):
            of(text)


def next_token(tokens: list[int]) -> int:
    """Mostly the one a period before."""
    return tokens[-PERIOD] if len(tokens) % 11 else len(tokens) * 1000 + tokens[0]


def expected(request: Request) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < request.limit and (
        len(tokens) == len(request.prompt) or tokens[-1] not in request.params.stop_token_ids
    ):
        tokens.append(next_token(tokens))
    return tokens


class Reading(Cache):
    """Also checks what the forward of guesses reads, and overwrites what others had rejected."""

    following = staticmethod(next_token)

    def run(self, chunks: list[Chunk]) -> dict[int, int]:
        out = {}
        for chunk in chunks:
            tokens = [*chunk.request.tokens, *chunk.proposed]
            for at in range(chunk.start, chunk.start + chunk.size):
                self.slots[self._slot(chunk.request, at)] = tuple(tokens[: at + 1])
        for chunk in chunks:
            request = chunk.request
            for at in range(chunk.start + chunk.count):
                assert self.slots[self._slot(request, at)] == tuple(request.tokens[: at + 1])
            if chunk.is_last:
                out[request.id] = self.following(request.tokens)
                while chunk.accept(out[request.id]):
                    out[request.id] = self.following(request.tokens)
        return out


def finish(plan: Scheduler, requests: list[Request], following: Any = next_token) -> int:
    """Serve them all; return the number of forwards."""
    cache = Reading(plan.blocks.block_size)
    cache.following = following
    for each in requests:
        plan.add(each)
    while plan.has_work:
        chunks = plan.schedule()
        assert chunks and sum(chunk.size for chunk in chunks) <= plan.token_budget
        plan.complete(chunks, cache.run(chunks))
        for each in plan.running:
            assert len(each.table.blocks) <= plan.blocks.blocks_for(len(each.tokens))
    assert plan.blocks.pool.num_free == plan.blocks.pool.num_blocks
    return plan.counts.forwards


@pytest.mark.parametrize("num_blocks", [18, 22, 64])
def test_requests_get_the_same_tokens(num_blocks: int) -> None:
    """With shared beginnings, preemptions, stop tokens and limits; nothing that was rejected is ever shared."""
    preemptions = 0
    for seed in range(8):
        numbers = random.Random(seed)
        requests = [
            asked(
                id,
                [numbers.randrange(3)] * numbers.randrange(9)
                + list(range(8, 8 + numbers.randrange(PERIOD, 20))),
                numbers.randrange(1, 41),
                stop_token_ids=(numbers.choice([9, 12, -1]),),
            )
            for id in range(9)
        ]
        plan = scheduler(num_blocks, speculation=NgramProposer(4, 3, 2))
        finish(plan, requests)
        assert [each.tokens for each in requests] == [expected(each) for each in requests]
        assert {each.reason for each in requests} <= {"stop", "length"}
        assert 0 < plan.counts.accepted_tokens <= plan.counts.proposed_tokens
        preemptions += plan.counts.preemptions
    assert num_blocks > 18 or preemptions


def test_a_text_that_repeats_takes_less_than_half_of_the_forwards() -> None:
    plain, guessing = scheduler(), scheduler(speculation=NgramProposer(4, 3, 2))
    requests = [asked(id, list(range(PERIOD)) * 2, 60) for id in range(2)]
    assert finish(plain, requests[:1]) == 60
    assert finish(guessing, requests[1:]) < 30 and requests[0].tokens == requests[1].tokens
    assert plain.counts.drafts == plain.counts.proposed_tokens == 0


def test_guesses_in_vain_become_rare() -> None:
    """And come back with the first that is right."""
    plan, given = scheduler(speculation=NgramProposer(4, 1, 1)), asked(0, [1, 500, 1], 100)
    plan.add(given)
    while plan.has_work:
        plan.complete(plan.schedule(), {0: 1 if given.tokens[-1] != 1 else 1000 + len(given.tokens)})
    assert given.generated.count(1) == 50 and 3 < plan.counts.drafts < 15 and plan.counts.accepted_tokens == 0
    plan, given = scheduler(speculation=NgramProposer(4, 1, 1)), asked(0, [1] * 3, 100)
    given.rejected_drafts = given.draft_backoff = 9
    assert finish(plan, [given], lambda tokens: 1) < 35


def test_guesses_take_only_what_others_leave() -> None:
    """Takes neither tokens of a forward from prompts, nor blocks for which a request would be preempted."""
    plan = scheduler(token_budget=16, speculation=NgramProposer(4, 3, 2))
    plan.add(asked(0, [1, 2, 3] * 4))
    plan.complete(plan.schedule(), {0: 1})
    plan.add(asked(1, list(range(100, 140)), 1))
    first, second = plan.schedule()
    assert (first.count, first.proposed, second.count) == (1, (), 15)
    plan.complete([first, second], {0: 2})
    assert plan.schedule(3)[0].proposed == ()
    plan = scheduler(3, speculation=NgramProposer(4, 3, 2))  # blocks of 4 tokens
    plan.add(asked(0, [1, 2] * 5, 2))
    plan.complete(plan.schedule(), {0: 1})
    assert plan.schedule()[0].proposed == () and plan.counts.preemptions == 0  # only one token may follow


def test_lengths_where_rotations_change_are_not_guessed_over() -> None:
    plan = scheduler(speculation=NgramProposer(4, 3, 2))
    plan.blocks.span = lambda length: int(length > 14)
    plan.add(asked(0, [1, 2] * 5))
    plan.complete(plan.schedule(), {0: 1})
    assert [len(chunk.proposed) for chunk in plan.schedule()] == [0]
    plan.blocks.span = lambda length: int(length > 15)
    assert [len(chunk.proposed) for chunk in plan.schedule()] == [4]
