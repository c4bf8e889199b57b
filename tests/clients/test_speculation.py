"""Speculative decoding over models of Transformers: the tokens that there are without it, every one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.inference.generation.draft import DraftModel
from deepspeed.inference.model.low_rank import load_adapter
from deepspeed.inference.scheduling.requests import Constraint, SamplingParams
from deepspeed.inference.scheduling.speculation import NgramProposer

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import make  # noqa: E402
from tests.clients.test_inference import FUSED, generator, like, model  # noqa: E402
from tests.clients.test_serving_adapters import saved  # noqa: E402


def ngrams() -> NgramProposer:
    return NgramProposer(4, 3, 1)


REPEATING = [[5, 6, 7, 8] * 4, [9, 3, 9, 3, 9], [11, 12, 13, 14, 15, 11, 12, 13], [20] * 6, [5, 6, 7, 8] * 3]


class Cycle:
    """Matches answers whose tokens are those of ``text``, again and again; ``once``: nothing may follow them."""

    def __init__(self, text: str, size: int, once: bool) -> None:
        self.tokens, self.size, self.at, self.once = [int(each) for each in text.split()], size, 0, once

    @property
    def is_complete(self) -> bool:
        return self.once and self.at >= len(self.tokens)

    def allowed(self) -> torch.Tensor:
        if self.is_complete:
            return torch.ones(self.size, dtype=torch.bool)
        found = torch.zeros(self.size, dtype=torch.bool)
        found[[self.tokens[self.at % len(self.tokens)], 3]] = True
        return found

    def advance(self, token: int) -> None:
        self.at += 1


class Cycles:
    def check(self, constraint: Constraint, size: int) -> None:
        pass

    def __call__(self, constraint: Constraint, size: int) -> Cycle:
        return Cycle(constraint.text, size, constraint.kind == "regex")


def both(module: Any, params: list[SamplingParams], proposer: Any = None, **settings: Any) -> tuple[Any, Any]:
    """The requests with speculation, which are those without, and their generator."""
    given = [REPEATING[index % len(REPEATING)] for index in range(len(params))]
    settings = {"token_budget": 24, "matcher_of": Cycles(), **settings}
    plain = generator(module, **settings).generate(given, params)
    engine = generator(module, speculation=proposer or ngrams(), **settings)
    found = engine.generate(given, params)
    for one, other in zip(plain, found, strict=True):
        assert one.tokens == other.tokens and one.reason == other.reason
        assert [each.token for each in one.logprobs] == [each.token for each in other.logprobs]
        for left, right in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            values = [torch.tensor([each.value for each in side]) for side in (left, right)]
            torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)
    counts = engine.counts
    assert 0 < counts.accepted_tokens <= counts.proposed_tokens
    assert engine.scheduler.blocks.pool.num_free == engine.scheduler.blocks.pool.num_blocks
    return found, engine


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": True},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "ends": {"min_new_tokens": 7, "stop_token_ids": tuple(range(0, 90, 3))},
    "masks": {"allowed_token_ids": (5, 6, 7, 8), "bad_words": ((5, 6, 8), (7, 7, 7))},
    "biases": {"logit_bias": ((5, 3.0), (6, 3.0))},
    "grammar": {"constraint": Constraint("choice", "5 6 7")},
    "whole grammar": {"constraint": Constraint("regex", "5 6 7 8 5 6 7 8 5 6"), "logprobs": True},
    "draws": {"temperature": 0.4, "top_k": 3, "seed": 3},
    "nucleus": {"temperature": 0.3, "top_p": 0.8, "min_p": 0.02},
}


@pytest.mark.parametrize("num_blocks", [15, 64])
def test_all_kinds_of_requests_get_the_same_tokens(num_blocks: int) -> None:
    """Beside each other; with few blocks, they are preempted. Draws are the same too."""
    params = [SamplingParams(max_new_tokens=30, **each) for each in KINDS.values()] * 2
    found, engine = both(model("llama"), params, num_blocks=num_blocks, max_length=56)
    whole = found[list(KINDS).index("whole grammar")]
    assert whole.reason == "stop" and len(whole.logprobs) == len(whole.generated) <= 10
    assert num_blocks == 64 or engine.counts.preemptions


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mistral"])
def test_layouts_and_windows(name: str) -> None:
    more = {"sliding_window": 6} if name == "mistral" else {}
    _, engine = both(model(name, **more), [SamplingParams(max_new_tokens=20)] * 5)
    assert (engine.runner.layout.name == "fused") == (name in FUSED)


def test_requests_with_adapters(tmp_path: Path) -> None:
    module = make("llama").eval()
    saved(module, tmp_path / "a", "llama", 1)
    adapter = load_adapter(module, str(tmp_path / "a"))
    both(module, [SamplingParams(max_new_tokens=20, adapter=each) for each in (None, adapter, adapter)])


def test_a_text_that_repeats_takes_few_forwards() -> None:
    """Counted: a grammar lets only one text follow."""
    masks = Constraint("choice", " ".join(map(str, range(4, 14))))
    params = [SamplingParams(max_new_tokens=40, constraint=masks, logit_bias=((3, -50.0),))]
    (found,), engine = both(model("llama"), params)
    assert engine.counts.forwards / len(found.generated) < 0.6


def test_sixteen_bits_have_the_same_bits() -> None:
    """Forwards with guesses use the kernels of those without, whose rows do not depend on each other."""
    module = make("llama").bfloat16().eval()
    params = [SamplingParams(max_new_tokens=30, logprobs=True) for _ in range(4)]
    given = REPEATING[:4]
    runs = []
    for speculation in (None, ngrams()):
        engine = generator(module, speculation=speculation)
        runs.append([(each.tokens, each.logprobs) for each in engine.generate(given, params)])
    if engine.runner.layout.name == "fused":
        assert runs[0] == runs[1] and engine.counts.accepted_tokens


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_draws_follow_the_distribution_of_the_model(method: str) -> None:
    """Pairs of tokens of 1,500 requests, with guesses that are rejected: chi-squared against exact values."""
    torch.manual_seed(0)
    module = make("llama", vocab_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2).eval()
    prompt, count = [3, 4, 5, 3, 4], 1500
    proposer = NgramProposer(2, 2, 1) if method == "ngram" else DraftModel(like(module, 0.05), 2)
    engine = generator(
        module, token_budget=256, max_sequences=64, num_blocks=256, max_length=8, speculation=proposer
    )
    found = engine.generate([prompt] * count, SamplingParams(max_new_tokens=3, temperature=1.0))
    with torch.no_grad():
        first = module(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        second = module(torch.tensor([[*prompt, each] for each in range(8)])).logits[:, -1].softmax(-1)
    wanted = (first[:, None] * second).double()
    seen = Counter(tuple(each.generated[:2]) for each in found)
    counted = torch.tensor([[seen[a, b] for b in range(8)] for a in range(8)]).double()
    statistic = ((counted - count * wanted) ** 2 / (count * wanted)).sum()
    assert statistic < 103.4  # the quantile 0.999 of 63 degrees of freedom
    assert 0 < engine.counts.accepted_tokens < engine.counts.proposed_tokens
