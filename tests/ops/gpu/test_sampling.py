"""Draws of tokens: the kernel's race of clocks, run again in PyTorch on what the filters of the host keep."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from deepspeed.inference.generation.logits import filtered
from deepspeed.inference.generation.sampling import Sampler
from deepspeed.inference.scheduling.requests import Request, SamplingParams
from tests.ops.gpu.triton_kit import built, compiling, interpreted

WORD = 2**32 - 1


def mixed(x: Tensor) -> Tensor:
    """The hash of 32 bits, in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def race(logits: Tensor, seeds: Tensor, drawn: Tensor, **params: Any) -> Tensor:
    """A token of each pair of a seed and a number of tokens drawn before."""
    high = mixed((seeds >> 32 & WORD) + mixed(drawn) & WORD)
    key = mixed((seeds & WORD) + high & WORD)
    words = mixed(torch.arange(len(logits)) ^ key[:, None]) >> 9
    scores = filtered(logits[None], [SamplingParams(**params)])[0]
    return (scores - (-((words + 0.5) / 2**23).log()).log()).argmax(-1)


def draws(logits: Tensor, seeds: list[int], drawn: list[int], **params: Any) -> list[int]:
    from deepspeed.ops.gpu import sampling

    given, count = SamplingParams(**params), len(seeds)
    return sampling.draw(
        logits.expand(count, -1),
        temperatures=[given.temperature] * count,
        top_k=[given.top_k] * count,
        top_p=[given.top_p] * count,
        min_p=[given.min_p] * count,
        seeds=seeds,
        drawn=drawn,
    )


LOGITS = torch.tensor([2.0, -1.0, 1.5, 0.0, 1.9, -4.0, 0.7])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
        {"top_p": 0.01},
        {"top_k": 1},
    ],
    ids=str,
)
@interpreted
def test_draws_are_those_of_the_race(params: dict[str, Any]) -> None:
    params = {"temperature": 0.8, **params}
    seeds, drawn = [3, 3, 3, 2**40 + 3, 2**63 - 5, 0], [0, 1, 2**20, 0, 7, 0]
    found = draws(LOGITS, seeds, drawn, **params)
    assert found == race(LOGITS, torch.tensor(seeds), torch.tensor(drawn), **params).tolist()


@pytest.mark.parametrize("seed", [3, 2**40])
def test_the_race_has_the_probabilities(seed: int) -> None:
    drawn = torch.arange(40_000)
    params = {"temperature": 0.8, "top_k": 5}
    expected = filtered(LOGITS[None], [SamplingParams(**params)])[0].softmax(-1)
    share = race(LOGITS, torch.full_like(drawn, seed), drawn, **params).bincount(minlength=7) / len(drawn)
    assert (share - expected).abs().max() < 0.01 and not share[expected == 0].any()


@interpreted
def test_a_vocabulary_of_several_tiles() -> None:
    logits = torch.randn(9001)
    logits[77] = -torch.inf
    params = {"temperature": 1.3, "top_k": 40, "top_p": 0.9}
    found = draws(logits, [3, 4], [0, 1], **params)
    assert found == race(logits, torch.tensor([3, 4]), torch.tensor([0, 1]), **params).tolist()
    assert draws(logits, [1], [0], temperature=0.0) == [int(logits.argmax())]


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
        assert Sampler().choose(logits, requests).keys() == {0, 2} and requests[1].cut == "failed"


@compiling
def test_draws_compile() -> None:
    from deepspeed.ops.gpu import sampling

    one: dict[str, Any] = {"temperatures": [1.0], "top_k": [5], "top_p": [0.9], "min_p": [0.0]}
    logits = torch.empty(1, 32000, dtype=torch.bfloat16)
    assert built(lambda: sampling.draw(logits, **one, seeds=[1], drawn=[0])) == {"_draw_kernel"}
