"""Choosing tokens: greedy, filtered, drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deepspeed.inference.generation.logits import LogitsProcessor, filtered
from deepspeed.inference.generation.sampling import Sampler
from deepspeed.inference.scheduling.requests import Constraint, Request, SamplingParams, TokenLogprob


def request(id: int = 0, **params: Any) -> Request:
    return Request(id, [1, 2], SamplingParams(**params))


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_most_probable_token() -> None:
    scores = logits(3, 50)
    chosen = Sampler().choose(scores, [request(id) for id in range(3)])
    assert chosen == {id: int(scores[id].argmax()) for id in range(3)}


def changed(
    scores: torch.Tensor, answer: list[int], prompt: list[int] | None = None, **params: Any
) -> list[float]:
    """Scores [vocabulary] of the token after ``prompt`` and ``answer``."""
    one = Request(0, prompt or [0], SamplingParams(**params))
    one.tokens += answer
    return LogitsProcessor()(scores[None], [one])[0].tolist()


def test_filters() -> None:
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0])
    kept = lambda **params: filtered(scores[None], [SamplingParams(**params)])[0].isfinite().tolist()  # noqa: E731
    assert kept(temperature=1, top_k=2) == [True, True, False, False, False]
    assert kept(temperature=1, top_p=0.6) == [True, False, False, False, False]
    assert kept(temperature=1, top_p=0.65) == [True, True, False, False, False]
    assert kept(temperature=1, top_p=1e-300) == [True, False, False, False, False]
    assert kept(temperature=1, min_p=0.3) == [True, True, False, False, False]
    assert kept(temperature=1) == [True] * 5
    assert kept(temperature=0, top_k=1, top_p=0.1, min_p=1.0) == [True] * 5


def test_filters_of_a_batch_are_those_of_each_row() -> None:
    scores = logits(6, 700)
    params = [
        SamplingParams(temperature=0.7, top_k=40, top_p=0.8),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.5, top_p=0.999),  # more than the likeliest 256 tokens
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=2.0, top_k=700),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.1),
    ]
    alone = [filtered(scores[row : row + 1], [each])[0] for row, each in enumerate(params)]
    assert torch.equal(filtered(scores, params), torch.stack(alone))
    kept = alone[2].softmax(-1)
    mass = float((scores[2] / 1.5).softmax(-1)[kept > 0].sum())
    assert int((kept > 0).sum()) > 256 and 0.999 <= mass < 0.9999


def test_penalties() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    assert changed(scores, [4], [0], repetition_penalty=2.0) == [1, 1, 0, -1, -4]
    # OpenAI's formula: minus the count times the frequency penalty, minus the presence penalty; of the answer only
    assert changed(scores, [1, 1, 3], [0, 0], frequency_penalty=0.5) == [2, 0, 0, -1.5, -2]
    assert changed(scores, [1, 1, 3], [0, 0], presence_penalty=-0.5) == [2, 1.5, 0, -0.5, -2]


def test_a_history_follows_its_request() -> None:
    scores, process = logits(2, 9), LogitsProcessor()
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.25)
    one, other = Request(0, [1, 2, 2], params), Request(1, [3], params)
    for token in (2, 5, 5, 8):
        process(scores, [one, other])
        one.tokens.append(token)
        other.tokens += [token, 0]  # two tokens may come at once
    assert torch.equal(process(scores, [one, other]), LogitsProcessor()(scores, [one, other]))


def test_biases_and_masks() -> None:
    scores, low = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]), -math.inf
    assert changed(scores, [], logit_bias=((0, -5.0), (4, 2.5))) == [-3, 1, 0, -1, 0.5]
    assert changed(scores, [], allowed_token_ids=(1, 3)) == [low, 1, low, -1, low]
    assert changed(scores, [], min_new_tokens=1, stop_token_ids=(0,)) == [low, 1, 0, -1, -2]
    assert changed(scores, [3], min_new_tokens=1, stop_token_ids=(0,)) == [2, 1, 0, -1, -2]
    assert changed(scores, [], min_new_tokens=1, stop_token_ids=(5, 0, -1)) == [low, 1, 0, -1, -2]
    words = ((2,), (3, 3, 1))
    assert changed(scores, [3, 3], bad_words=words) == [2, low, low, -1, -2]
    assert changed(scores, [3], [3], bad_words=words) == [
        2,
        1,
        low,
        -1,
        -2,
    ]  # the prompt is no part of a word
    given = scores.clone()
    changed(given, [], logit_bias=((0, 100.0),))
    assert torch.equal(given, scores)


class Countdown:
    """Allows the token one below the last, from ``start`` on."""

    is_complete = False

    def __init__(self, start: int = 0, size: int = 0) -> None:
        self.next, self.size = start, size

    def check(self, constraint: Constraint, size: int) -> None: ...

    def __call__(self, constraint: Constraint, size: int) -> Countdown:
        return Countdown(int(constraint.text), size)

    def allowed(self) -> torch.Tensor:
        return torch.arange(self.size) == self.next

    def advance(self, token: int) -> None:
        assert token == self.next
        self.next -= 1


def test_constraints_follow_their_requests() -> None:
    sampler = Sampler(matcher_of=Countdown())
    params = [SamplingParams(constraint=Constraint("regex", start)) for start in ("5", "7")]
    requests = [Request(id, [1], each) for id, each in enumerate(params)]
    for _ in range(4):
        for id, token in sampler.choose(logits(2, 9), requests).items():
            requests[id].tokens.append(token)
    assert [each.generated for each in requests] == [[5, 4, 3, 2], [7, 6, 5, 4]]


def test_draws_follow_the_probabilities_and_only_the_seed() -> None:
    scores, sampler = logits(8), Sampler()
    drawn = torch.zeros(8)
    one = request(0, temperature=1.0, seed=3)
    for _ in range(4000):
        drawn[sampler.choose(scores[None], [one])[0]] += 1
    torch.testing.assert_close(drawn / 4000, scores.softmax(-1), atol=0.03, rtol=0)
    alone = [Sampler().choose(scores[None], [request(5, temperature=1.0, seed=s)])[5] for s in range(20)]
    among = [
        Sampler().choose(
            scores.expand(2, -1), [request(1, temperature=2.0), request(9, temperature=1.0, seed=s)]
        )[9]
        for s in range(20)
    ]
    assert alone == among and len(set(alone)) > 1


def test_what_is_excluded_follows_if_nothing_else_may() -> None:
    """A draw from nothing would be an error of the whole batch."""
    sampler = Sampler(matcher_of=Countdown())
    five = Constraint("regex", "5")
    params = SamplingParams(
        constraint=five, temperature=1.0, min_new_tokens=9, stop_token_ids=(5,), max_new_tokens=9
    )
    apart = SamplingParams(constraint=five, allowed_token_ids=(1, 2), bad_words=((5,),))
    chosen = sampler.choose(logits(2, 9), [Request(0, [1], params), Request(1, [1], apart)])
    assert chosen == {0: 5, 1: 5}


def test_logprobs_are_those_of_the_model() -> None:
    scores = logits(1, 20)
    one = request(logprobs=True, temperature=0.5, top_k=3)
    token = Sampler().choose(scores, [one])[0]
    value = float(scores.log_softmax(-1)[0, token])
    assert one.logprobs == [TokenLogprob(token, pytest.approx(value))]  # type: ignore[arg-type]


def test_logprobs_of_the_likeliest_tokens() -> None:
    scores = logits(2, 20)
    one, other = request(0, logprobs=True, top_logprobs=3), request(1, logprobs=True)
    Sampler().choose(scores, [one, other])
    best = scores.log_softmax(-1)[0].topk(3)
    assert one.logprobs[0].top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert one.logprobs[0].token == int(best.indices[0]) and other.logprobs[0].top == ()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.5, "logprobs": True}]
)
def test_logits_that_are_not_finite_end_their_request_alone(wrong: float, settings: dict[str, Any]) -> None:
    scores = torch.stack([torch.full((40,), wrong), torch.arange(40.0)])
    bad, good = request(0, **settings), request(1)
    assert Sampler().choose(scores, [bad, good]) == {1: 39}
    assert bad.cut == "failed" and good.cut is None and not bad.logprobs
