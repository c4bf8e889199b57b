"""Speculative decoding with a draft model: the tokens that there are without it, and how few forwards they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.inference.generation.draft import DraftModel
from deepspeed.inference.scheduling.requests import SamplingParams

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

import deepspeed  # noqa: E402
from tests.clients.architectures import make  # noqa: E402
from tests.clients.kit import clean_clients  # noqa: E402
from tests.clients.test_inference import generator, like, model  # noqa: E402
from tests.clients.test_speculation import KINDS, both  # noqa: E402
from tests.pool import distributed  # noqa: E402

NOISE = 0.05


def counted(draft: DraftModel) -> list[int]:
    """The tokens of each forward of the draft model from now on."""
    seen: list[int] = []
    forward = draft.runner.forward

    def counting(pieces: Any, unchanged: bool = False) -> torch.Tensor:
        seen.append(sum(piece.count for piece in pieces))
        return forward(pieces, unchanged)

    draft.runner.forward = counting  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(("num_blocks", "budget"), [(15, 512), (64, 512), (64, 5)])
def test_all_kinds_of_requests_get_the_same_tokens(num_blocks: int, budget: int) -> None:
    """Beside each other; with few blocks they are preempted; with a small budget the draft model is late."""
    params = [SamplingParams(max_new_tokens=30, **each) for each in KINDS.values()] * 2
    draft = DraftModel(like(model("llama"), NOISE), 3, token_budget=budget)
    _, engine = both(model("llama"), params, draft, num_blocks=num_blocks, max_length=56)
    assert num_blocks == 64 or engine.counts.preemptions
    pool = draft.blocks.pool
    assert pool.num_free == pool.num_blocks and not draft._sequences


def test_sixteen_bits_have_the_same_bits() -> None:
    module = make("llama").bfloat16().eval()
    given = [[5, 6, 7, 8] * 3, [9, 3, 9], [11, 12, 13, 14, 15]]
    params = SamplingParams(max_new_tokens=30, logprobs=True)
    runs = []
    for speculation in (None, DraftModel(like(module, NOISE), 4)):
        engine = generator(module, speculation=speculation)
        runs.append([(each.tokens, each.logprobs) for each in engine.generate(given, params)])
    if engine.runner.layout.name == "fused":
        assert runs[0] == runs[1] and 0 < engine.counts.accepted_tokens < engine.counts.proposed_tokens


def test_a_draft_model_that_is_always_right() -> None:
    """Counted: five tokens a forward; the draft model computes each token once, but for the last of its guesses."""
    module, draft = model("llama"), DraftModel(model("llama"), 4)
    engine, seen = generator(module, speculation=draft), counted(draft)
    given = [[5, 6, 7, 8, 9], [11, 12, 13]]
    found = engine.generate(given, SamplingParams(max_new_tokens=21))
    counts = engine.counts
    assert counts.accepted_tokens == counts.proposed_tokens == 2 * 16
    assert counts.forwards == 5  # 4 times 5 tokens, then 1
    assert seen == [5 + 3, 2, 2, 2, *[4, 2, 2, 2] * 3]
    assert [each.tokens for each in found] == [
        each.tokens for each in generator(module).generate(given, SamplingParams(max_new_tokens=21))
    ]


def test_a_common_beginning_is_drafted_once() -> None:
    module, draft = model("llama"), DraftModel(model("llama"), 4)
    engine, seen = generator(module, speculation=draft, num_blocks=64), counted(draft)
    common = list(range(10, 43))
    for last, computed in ((3, 34), (4, 2)):  # blocks of 16 tokens
        seen.clear()
        engine.generate([[*common, last]], SamplingParams(max_new_tokens=3))
        assert seen[0] == computed


def test_guesses_are_shared_evenly() -> None:
    """Of four tokens in all, with blocks for two of three requests."""
    draft = DraftModel(model("llama"), 4)
    with pytest.raises(ValueError, match=r"has 96 tokens in its vocabulary, but the model has 97"):
        draft.start(97, 64)
    draft.start(96, 64)
    engine = generator(model("llama"))
    requests = [engine.submit([index + 3] * 20, SamplingParams()) for index in range(3)]
    found = draft.propose([(each, 9) for each in requests], 4)
    assert [len(each) for each in found] == [2, 2, 0]
    for each in requests:
        draft.forget(each)
    assert draft.blocks.pool.num_free == 4


@pytest.mark.slow
@distributed(world_size=2)
def test_two_ranks_share_both_models() -> None:
    with clean_clients(deepspeed_state=False):
        given, params = [[5, 6, 7, 8], [9, 3, 9], [11, 12]], SamplingParams(max_new_tokens=20)
        wanted = [each.tokens for each in generator(make("llama").eval()).generate(given, params)]
        settings: Any = {"dtype": torch.float32, "tensor_parallel": {"tp_size": 2}}
        draft = deepspeed.init_inference(like(make("llama").eval(), NOISE), **settings)
        target = deepspeed.init_inference(make("llama").eval(), **settings)
        engine = generator(
            target.module, group=target.mp_group, speculation=DraftModel(draft.module, 3), num_blocks=None
        )
        assert [each.tokens for each in engine.generate(given, params)] == wanted
        assert 0 < engine.counts.accepted_tokens <= engine.counts.proposed_tokens
