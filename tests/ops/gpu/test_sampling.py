"""Draws of tokens: only those that the filters of the host keep, with their probabilities."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from deepspeed.inference.sampling import Sampler, processed
from deepspeed.inference.scheduling.requests import Request, SamplingParams
from tests.ops.gpu.triton_kit import built, compiling, interpreted


def draws(logits: torch.Tensor, count: int, seed: int = 3, **params: Any) -> torch.Tensor:
    """How often each token is drawn from ``logits`` [vocabulary]."""
    from deepspeed.ops.gpu import sampling

    given = SamplingParams(**params)
    found = sampling.draw(
        logits.expand(count, -1),
        temperatures=[given.temperature] * count,
        top_k=[given.top_k] * count,
        top_p=[given.top_p] * count,
        min_p=[given.min_p] * count,
        seeds=[seed] * count,
        drawn=list(range(count)),
    )
    return torch.tensor(found).bincount(minlength=len(logits))


@interpreted
def test_only_what_the_filters_keep_with_its_probability() -> None:
    logits = torch.tensor([2.0, -1.0, 1.5, 0.0, 1.9, -4.0, 0.7])
    for params in (
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
    ):
        params = {"temperature": 0.8, **params}
        expected = processed(logits, SamplingParams(**params), [], 0).softmax(-1)
        share = draws(logits, 250, **params) / 250
        assert torch.equal(share > 0, expected > 0) or (share[expected == 0] == 0).all()
        assert (share - expected).abs().max() < 0.1, (params, share, expected)
    assert draws(logits, 3, temperature=0.0)[0] == 3
    assert torch.equal(draws(logits, 20, temperature=1.0), draws(logits, 20, temperature=1.0))
    assert not torch.equal(draws(logits, 20, temperature=1.0), draws(logits, 20, seed=2**40, temperature=1.0))


@interpreted
def test_a_vocabulary_of_several_tiles() -> None:
    logits = torch.randn(9001)
    kept = processed(logits, SamplingParams(temperature=1.3, top_k=4, top_p=0.9), [], 0).isfinite()
    found = draws(logits, 4, temperature=1.3, top_k=4, top_p=0.9)
    assert not found[~kept].any() and found.sum() == 4
    assert draws(logits, 1, temperature=0.0)[logits.argmax()] == 1
    assert draws(logits, 1, temperature=1.0, top_k=1)[logits.argmax()] == 1


@interpreted
def test_the_sampler_takes_it_on_a_gpu() -> None:
    logits = torch.randn(3, 40)
    logits[0, 7], logits[2, 5] = 50.0, 60.0
    requests = [
        Request(0, [1, 2], SamplingParams(temperature=1.0, min_new_tokens=1, stop_token_ids=(7,))),
        Request(1, [1, 2], SamplingParams()),
        Request(2, [5, 2], SamplingParams(temperature=0.5, repetition_penalty=2.0)),
    ]
    with mock.patch("deepspeed.ops.gpu.usable", lambda *tensors: True):
        chosen = Sampler().choose(logits, requests)
        assert chosen[0] != 7 and chosen[1] == logits[1].argmax() and chosen[2] == 5
        logits[1, 3] = float("nan")
        try:
            Sampler().choose(logits, requests)
        except ValueError as error:
            assert "request 1 " in str(error)
        else:
            raise AssertionError("logits that are not finite were taken")


@compiling
def test_draws_compile() -> None:
    from deepspeed.ops.gpu import sampling

    one: dict[str, Any] = {"temperatures": [1.0], "top_k": [5], "top_p": [0.9], "min_p": [0.0]}
    logits = torch.empty(1, 32000, dtype=torch.bfloat16)
    assert built(lambda: sampling.draw(logits, **one, seeds=[1], drawn=[0])) == {"_draw_kernel"}
