"""Models of Transformers as they are, by continuous batching: the tokens of `generate`, every one."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.base.logging import logger
from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.model.info import LayoutError
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.inference.scheduling.requests import SamplingParams
from deepspeed.ops.native import library

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import make  # noqa: E402

NEW = 12
LENGTHS = (3, 21, 9, 14, 5)
PACKED = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi phi3 gpt2 gpt_neox gpt_bigcode opt olmo2 cohere2 starcoder2 "
    "mixtral qwen2_moe deepseek_v3 gpt_oss"
).split()
FUSED = "llama mistral qwen2 qwen3 phi3".split()
PADDED = "gptj gpt_neo bloom mpt falcon falcon_grouped falcon_alibi".split()
WINDOWS = ("mistral", "gemma2", "gemma3", "phi3", "cohere2", "starcoder2", "gpt_oss")


@functools.cache
def model(name: str, **more: Any) -> nn.Module:
    return make(name, **more).eval()


def like(module: nn.Module, noise: float) -> nn.Module:
    """A model that mostly chooses as ``module`` does: one with noise in its weights."""
    made, numbers = copy.deepcopy(module), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in made.parameters():
            param += noise * param.std() * torch.randn(param.shape, generator=numbers).to(param.dtype)
    return made


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(7)
    return [torch.randint(3, 90, (length,), generator=numbers).tolist() for length in lengths]


def expected(module: Any, given: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Each alone."""
    settings = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    return [
        module.generate(torch.tensor([prompt]), generation_config=settings)[0].tolist() for prompt in given
    ]


def generator(module: nn.Module, **more: Any) -> Generator:
    settings = {"token_budget": 16, "max_sequences": 4, "block_size": 4, "num_blocks": 64, "max_length": 60}
    return Generator(module, **{**settings, **more})


@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_mixed_lengths_give_the_tokens_of_generate(name: str) -> None:
    """Prompts are cut, share forwards, wait, and lose their blocks to each other."""
    more = {"sliding_window": 6} if name in WINDOWS else {}
    module = model(name, **more)
    wanted = expected(module, prompts())
    engine = generator(module, num_blocks=14)
    layout = "fused" if name in FUSED and library() is not None else "packed" if name in PACKED else "padded"
    assert engine.runner.layout.name == layout
    params = SamplingParams(max_new_tokens=NEW, stop_token_ids=engine.runner.info.stop_token_ids)
    found = engine.generate(prompts(), params)
    assert [request.tokens for request in found] == wanted
    assert engine.counts.preemptions > 0
    assert module.config._attn_implementation != "deepspeed_paged"
    assert expected(module, prompts()[:1]) == wanted[:1]  # the model is what it was


def test_who_overtakes_and_who_is_overtaken_get_the_tokens_of_generate() -> None:
    module = model("llama")
    given = prompts((40, 5, 41, 6, 4))
    engine = generator(module, token_budget=8)
    found = engine.generate(given, SamplingParams(max_new_tokens=NEW))
    assert [request.tokens for request in found] == expected(module, given)
    assert engine.counts.overtaking_tokens > 0


def test_no_request_of_a_client_stops_the_generator() -> None:
    """Tokens that the model does not know are refused; extreme numbers that are taken can be computed with."""
    engine = generator(model("llama"))
    for prompt in ([1, 10**9], [-1, 1], [engine.runner.info.vocab_size]):
        for refuse in (engine.check, engine.submit):
            with pytest.raises(ValueError, match="is outside the vocabulary"):
                refuse(prompt, SamplingParams())
    with pytest.raises(ValueError, match="is outside the vocabulary"):
        engine.generate([[1, 2], [1, 10**9]])  # the first is not served by the next call
    assert not engine.has_work
    extremes: tuple[dict[str, Any], ...] = (
        {"seed": 10**30},
        {"seed": -(10**30)},
        {"temperature": 1e-6},
        {"temperature": 1e6},
        {"top_k": 10**30},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-3, "temperature": 1e-6, "min_new_tokens": 3, "stop_token_ids": (1,)},
        {"repetition_penalty": 1e3, "temperature": 1e6},
    )
    params = [
        SamplingParams(**{"max_new_tokens": 3, "temperature": 1.0, "logprobs": True, **each})
        for each in extremes
    ]
    found = engine.generate([[1, 2, 3]] * len(params), params)
    assert all(len(request.generated) == 3 for request in found)
    for wrong in ({"temperature": 1e-300}, {"temperature": float("inf")}, {"repetition_penalty": 1e-300}):
        with pytest.raises(ValueError, match="is not allowed"):
            SamplingParams(**wrong)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptj"])  # fused, packed, padded
def test_what_others_left_in_the_cache_is_not_read(name: str) -> None:
    """Such as the NaN of a request whose logits overflowed, which would pass to all that get its blocks."""
    module, given = model(name), prompts()
    engine = generator(module)
    for layer in engine.runner.cache.shapes:
        for pages in engine.runner.cache.pages(layer):
            pages.fill_(torch.nan)
    found = engine.generate(given, SamplingParams(max_new_tokens=NEW))
    assert [each.tokens for each in found] == expected(module, given)


def test_a_common_beginning_is_computed_once() -> None:
    module = model("llama")
    common = prompts((17,))[0]
    given = [[*common, 5, 6], [*common, 7], [*common, 5, 6, 8], common]
    wanted = expected(module, given)
    engine = generator(module)
    first = engine.generate(given[:1], SamplingParams(max_new_tokens=NEW))
    rest = engine.generate(given[1:], SamplingParams(max_new_tokens=NEW))
    assert [request.tokens for request in first + rest] == wanted
    assert [request.shared for request in rest] == [16, 16, 16]


def test_draws_do_not_depend_on_what_is_beside_them() -> None:
    module = model("qwen2")
    params = [SamplingParams(max_new_tokens=8, temperature=1.0, top_k=20, seed=seed) for seed in range(4)]
    together = generator(module).generate(prompts()[:4], params)
    alone = [generator(module).generate([p], [q])[0] for p, q in zip(prompts()[:4], params, strict=True)]
    assert [request.tokens for request in together] == [request.tokens for request in alone]


def test_logprobs_are_those_of_the_model() -> None:
    module = model("llama")
    request = generator(module).generate(prompts()[:1], SamplingParams(max_new_tokens=5, logprobs=True))[0]
    with torch.no_grad():
        rows = module(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
    start = len(request.prompt) - 1
    wanted = [float(rows[start + i, token]) for i, token in enumerate(request.generated)]
    assert [each.value for each in request.logprobs] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptj"])  # fused, packed, padded
def test_logprobs_of_prompts_are_those_of_the_model(name: str) -> None:
    """Prompts are cut into chunks, and requests restart; one generates nothing."""
    module, given = model(name), prompts((21, 9, 2, 30))
    engine = generator(module, num_blocks=14)
    engine.generate(given, SamplingParams(max_new_tokens=1))  # beginnings are in the cache
    params = [
        SamplingParams(max_new_tokens=new, prompt_logprobs=True, logprobs=bool(new), top_logprobs=2)
        for new in (0, 12, 12, 12)
    ]
    found = engine.generate(given, params)
    assert [len(each.generated) for each in found] == [0, 12, 12, 12]
    assert [each.reason for each in found] == ["length"] * 4
    for each in found:
        with torch.no_grad():
            rows = module(torch.tensor([each.tokens])).logits[0].float().log_softmax(-1)
        told = each.prompt_logprobs + each.logprobs
        assert [entry.token for entry in told] == each.tokens[1:]
        wanted = rows[:-1].gather(1, torch.tensor(each.tokens[1:])[:, None])[:, 0].tolist()
        assert [entry.value for entry in told] == pytest.approx(wanted, abs=1e-4)
        best = rows[:-1].topk(2)
        assert [[token for token, _ in entry.top] for entry in told] == best.indices.tolist()
    assert any(each.preemptions for each in found)


def test_a_stream_gives_tokens_as_they_come_and_can_be_closed() -> None:
    module = model("llama")
    wanted = expected(module, prompts()[:1])[0][len(prompts()[0]) :]
    engine = generator(module)
    assert list(engine.stream(prompts()[0], SamplingParams(max_new_tokens=NEW))) == wanted
    stream = engine.stream(prompts()[0], SamplingParams(max_new_tokens=NEW))
    assert [next(stream), next(stream)] == wanted[:2]
    stream.close()
    assert not engine.has_work and engine.scheduler.blocks.pool.num_free == 64


def test_sixteen_bits() -> None:
    module = make("llama").eval().to(torch.bfloat16)
    engine = generator(module)
    request = engine.generate(prompts()[:2], SamplingParams(max_new_tokens=4))[0]
    assert len(request.generated) == 4 and engine.runner.shapes[0].dtype is torch.bfloat16


@pytest.mark.parametrize(("given", "told"), [(60, True), (56, False), (None, False)])
def test_a_small_cache_shortens_requests_with_a_warning(
    given: int | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logger, "log", lambda level, text, **_: lines.append(text))
    engine = generator(model("llama"), num_blocks=14, max_length=given)
    assert engine.scheduler.max_length == 56
    shortened = [line for line in lines if "shortened" in line]
    assert len(shortened) == told and all("max_length=60 is shortened to 56" in line for line in shortened)


def test_what_cannot_be_run_is_refused_with_reasons() -> None:
    with pytest.raises(LayoutError, match="not a causal language model"):
        ModelRunner(model("t5"))
    with pytest.raises(LayoutError, match="no Transformers config"):
        ModelRunner(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_length=100: the model supports 64"):
        generator(model("opt"), max_length=100)

    class Odd(nn.Module):
        """Its logits depend on how many tokens it is given at once."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.config = inner, inner.config

        def get_output_embeddings(self) -> Any:
            return self.inner.get_output_embeddings()

        def forward(self, input_ids: Any, position_ids: Any = None, **more: Any) -> Any:
            out = self.inner(input_ids=input_ids, position_ids=position_ids, **more)
            out.logits = out.logits + input_ids.shape[1]
            return out

    with pytest.raises(LayoutError, match="packed: logits differ .* padded: logits differ"):
        ModelRunner(Odd(model("llama")))
