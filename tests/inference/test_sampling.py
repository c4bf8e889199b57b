"""Choosing tokens: greedy, filtered, drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.inference.generation.sampling import Sampler, log_probabilities, processed
from deepspeed.inference.scheduling.requests import Request, SamplingParams


def request(id: int = 0, **params: Any) -> Request:
    return Request(id, [1, 2], SamplingParams(**params))


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_most_probable_token() -> None:
    scores = logits(3, 50)
    chosen = Sampler().choose(scores, [request(id) for id in range(3)])
    assert chosen == {id: int(scores[id].argmax()) for id in range(3)}


def test_filters() -> None:
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0])
    kept = lambda **params: processed(scores, SamplingParams(**params), [], 0).isfinite().tolist()  # noqa: E731
    assert kept(temperature=1, top_k=2) == [True, True, False, False, False]
    assert kept(temperature=1, top_p=0.6) == [True, False, False, False, False]
    assert kept(temperature=1, top_p=0.65) == [True, True, False, False, False]
    assert kept(temperature=1, min_p=0.3) == [True, True, False, False, False]
    assert kept(temperature=1) == [True] * 5
    assert kept(min_new_tokens=1, stop_token_ids=(0,)) == [False, True, True, True, True]
    halved = processed(scores - 2, SamplingParams(repetition_penalty=2.0), [0, 4], 2)
    assert halved.tolist() == [1, 1, 0, -1, -4]


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


def test_logprobs_are_those_of_the_model() -> None:
    scores = logits(1, 20)
    one = request(logprobs=True, temperature=0.5, top_k=3)
    token = Sampler().choose(scores, [one])[0]
    assert one.logprobs == [pytest.approx(float(log_probabilities(scores)[0, token]))]


def test_logits_that_are_not_finite_are_told() -> None:
    with pytest.raises(ValueError, match="request 0 are not finite"):
        Sampler().choose(torch.full((1, 4), torch.nan), [request(temperature=1.0)])
