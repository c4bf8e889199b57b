"""Transformers' generate with each forward in one native call: the same tokens, and the same further outputs."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed.base.transformers_models import attention_registries
from deepspeed.inference.cache import pages
from deepspeed.inference.generation.fused import FusedGeneration
from deepspeed.inference.model import fused, packed
from deepspeed.inference.model.info import LayoutError
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.ops import native
from deepspeed.ops.host_graph import HostGraph
from tests.clients.kit import clean_clients
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import make  # noqa: E402

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library")

PROMPTS = torch.tensor([[0, 0, 0, 5, 17, 3], [60, 22, 9, 41, 8, 11], [0, 7, 7, 30, 2, 19]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each forward that was one native call."""
    rows: list[int] = []
    plain = HostGraph.run

    def run(self: HostGraph, step: Any, threads: int | None = None) -> None:
        if len(self._operations) > 1:
            rows.append(step.rows)
        plain(self, step, threads)

    monkeypatch.setattr(HostGraph, "run", run)
    return rows


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return counted(monkeypatch)


def both(module: Any, runs: list[int], **kwargs: Any) -> tuple[Tensor, Tensor, int]:
    """Tokens of the module's own generate, those of ours, and how many forwards were one call."""
    given = {"input_ids": PROMPTS, "attention_mask": MASK, "pad_token_id": 0, **kwargs}
    torch.manual_seed(3)
    wanted = module.generate(**given)
    generation = FusedGeneration()
    generation.generate(module, **{**given, "max_new_tokens": 1})  # finds out about the module
    runs.clear()
    torch.manual_seed(3)
    return wanted, generation.generate(module, **given), len(runs)


class Shift(transformers.LogitsProcessor):
    """Forbids the token that is the last one plus one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, ((input_ids[:, -1:] + 1) % scores.shape[1]), -1e9)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_the_same_tokens(name: str, runs: list[int]) -> None:
    wanted, found, calls = both(make(name).eval(), runs, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, wanted) and calls >= 11


def test_an_old_release_of_transformers(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 4.53, models made their masks themselves: they generate as they are, and attention cannot be replaced."""

    def before(purpose: str) -> Any:
        with mock.patch.dict(sys.modules, {"transformers.masking_utils": None}):
            return attention_registries(purpose)

    monkeypatch.setattr(packed, "attention_registries", before)
    module = make("llama").eval()
    wanted, found, calls = both(module, runs, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, wanted) and calls == 0
    with pytest.raises(LayoutError, match=r"needs transformers>=4\.53.* is installed"):
        ModelRunner(module, layouts=(packed.PackedLayout,))


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "repetition_penalty": 1.7, "min_new_tokens": 6, "eos_token_id": [4, 9, 23]},
        {"do_sample": False, "logits_processor": [Shift()]},
        {"generation_config": {"do_sample": True, "top_k": 3, "max_new_tokens": 9}},
    ],
    ids=["samples", "several", "penalties and ends", "processor", "config"],
)
def test_tokens_are_chosen_as_ever(settings: dict[str, Any], runs: list[int]) -> None:
    if "generation_config" in settings:
        settings = {"generation_config": transformers.GenerationConfig(**settings["generation_config"])}
    else:
        settings = {"max_new_tokens": 10, **settings}
    wanted, found, calls = both(make("llama").eval(), runs, **settings)
    assert torch.equal(found, wanted) and calls >= 5


@pytest.mark.parametrize("samples", [False, True])
def test_a_row_that_has_ended_is_computed_no_more(samples: bool, runs: list[int]) -> None:
    module = make("llama").eval()
    settings: dict[str, Any] = {"do_sample": samples, "max_new_tokens": 12}
    free = both(module, runs, **settings)[1][:, 6:]
    ends = [int(free[0, 2]), int(free[1, 6])]
    stops = [next((at + 1 for at, token in enumerate(row) if token in ends), 12) for row in free.tolist()]
    wanted, found, calls = both(module, runs, eos_token_id=ends, **settings)
    assert torch.equal(found, wanted)
    assert len(set(stops)) > 1 and calls == max(stops)
    assert runs[1:] == [sum(stop > step for stop in stops) for step in range(1, max(stops))]


@pytest.mark.parametrize("length", [6, 32, 37])
def test_prompts_that_are_the_same_are_computed_once(length: int, runs: list[int]) -> None:
    """Whether they end with a block of the cache or in the middle of one."""
    prompts = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(2))
    given = {"input_ids": prompts[[0, 1, 0, 0]], "attention_mask": torch.ones(4, length, dtype=torch.long)}
    settings = {"do_sample": True, "max_new_tokens": 20, "min_new_tokens": 20}
    wanted, found, _ = both(make("llama").eval(), runs, **settings, **given)
    assert torch.equal(found, wanted)
    most = fused.PROGRAM_ROWS if native.isa() == "avx512" else fused.PROGRAM_ROWS_OF_FLOATS
    assert runs == ([2 * length] if 2 * length <= most else []) + [4] * 19


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 2},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"return_dict_in_generate": True, "output_hidden_states": True},
        {"attention_mask": MASK.flip(1)},
        {"prompt_lookup_num_tokens": 2, "input_ids": PROMPTS[1:2], "attention_mask": MASK[1:2]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_needs_more_of_the_model_is_its_own(settings: dict[str, Any], runs: list[int]) -> None:
    wanted, found, calls = both(make("llama").eval(), runs, max_new_tokens=5, do_sample=False, **settings)
    if isinstance(wanted, Tensor):
        assert torch.equal(found, wanted)
    else:
        assert torch.equal(found.sequences, wanted.sequences)  # type: ignore[attr-defined]
        assert len(found.hidden_states) == 5  # type: ignore[attr-defined]
    assert calls == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_logits_scores_and_a_cache_to_go_on_with(name: str, runs: list[int]) -> None:
    module = make(name).eval()
    wanted, found, calls = both(
        module,
        runs,
        max_new_tokens=5,
        do_sample=False,
        repetition_penalty=1.3,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    assert calls >= 4 and torch.equal(found.sequences, wanted.sequences)
    for one, other in ((found.logits, wanted.logits), (found.scores, wanted.scores)):
        torch.testing.assert_close(torch.stack(one), torch.stack(other), rtol=1e-4, atol=1e-5)
    mask = torch.cat([MASK, torch.ones(3, 5, dtype=MASK.dtype)], 1)
    after = [
        module(
            made.sequences[:, -1:],
            attention_mask=mask,
            position_ids=mask.sum(1)[:, None] - 1,
            past_key_values=made.past_key_values,
        ).logits
        for made in (wanted, found)
    ]
    torch.testing.assert_close(*after, rtol=1e-4, atol=1e-5)


def test_who_listens_is_heard_and_training_is_not_evaluation(runs: list[int]) -> None:
    module = make("llama").eval()
    generation = FusedGeneration()
    generation.generate(module, PROMPTS, attention_mask=MASK, max_new_tokens=2, pad_token_id=0)
    assert runs
    runs.clear()
    heard = []
    handle = module.model.layers[0].register_forward_hook(lambda *_: heard.append(1))
    generation.generate(module, PROMPTS, attention_mask=MASK, max_new_tokens=4, pad_token_id=0)
    handle.remove()
    assert len(heard) == 4 and not runs
    module.train()
    generation.generate(module, PROMPTS, attention_mask=MASK, max_new_tokens=2, pad_token_id=0)
    assert not runs


def test_caches_grow_and_are_given_back(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    plain = pages.PagedCache.__init__

    def init(self: Any, shapes: Any, blocks: int, size: int) -> None:
        made.append(blocks)
        alive.add(self)
        plain(self, shapes, blocks, size)

    module = make("llama").eval()
    monkeypatch.setattr("deepspeed.inference.generation.fused._FIRST_TOKENS", 16)
    monkeypatch.setattr(pages.PagedCache, "__init__", init)
    generation = FusedGeneration()
    given = {"attention_mask": MASK, "pad_token_id": 0, "max_new_tokens": 60, "do_sample": False}
    found = generation.generate(module, PROMPTS, **given)
    assert torch.equal(found, module.generate(PROMPTS, **given))
    assert made[-1] == 2 * made[-2]
    gc.collect()
    assert not alive


@pytest.mark.parametrize("wrong", [96, -3])
def test_a_token_outside_the_vocabulary_is_an_error(wrong: int, runs: list[int]) -> None:
    """As in the module's own generate; native kernels would read beyond the embedding."""
    module = make("llama").eval()
    for generate in (module.generate, functools.partial(FusedGeneration().generate, module)):
        with pytest.raises(IndexError):
            generate(torch.tensor([[5, 6, wrong]]), max_new_tokens=2, pad_token_id=0)


def test_weights_that_are_cast_are_not_read_as_before(runs: list[int]) -> None:
    module, generation = make("llama").eval(), FusedGeneration()
    given = {"input_ids": PROMPTS, "attention_mask": MASK, "pad_token_id": 0, "do_sample": False}
    generation.generate(module, max_new_tokens=4, **given)
    assert runs
    runs.clear()
    module.half()  # the kernels do not read this type
    wanted = module.generate(max_new_tokens=4, **given)
    assert torch.equal(generation.generate(module, max_new_tokens=4, **given), wanted) and not runs


def test_a_streamer_is_fed() -> None:
    class Stream(transformers.generation.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: Tensor) -> None:
            self.seen += value.reshape(-1).tolist()

        def end(self) -> None:
            self.seen.append(-1)

    module, stream = make("llama").eval(), Stream()
    found = FusedGeneration().generate(
        module, PROMPTS[1:2], max_new_tokens=4, streamer=stream, pad_token_id=0
    )
    assert stream.seen == [*found[0].tolist(), -1]


def test_init_inference_with_kernels(runs: list[int]) -> None:
    module = make("llama").eval()
    given = {"attention_mask": MASK, "pad_token_id": 0, "max_new_tokens": 6, "do_sample": False}
    wanted = module.generate(PROMPTS, **given)
    engine = deepspeed.init_inference(module, dtype=torch.float32, replace_with_kernel_inject=True)
    assert torch.equal(engine.generate(PROMPTS, **given), wanted)
    assert len([rows for rows in runs if rows == 3]) >= 5


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=2)
def test_rollouts_of_the_hybrid_engine(stage: int) -> None:
    with clean_clients():
        module = make("llama")
        config: dict[str, Any] = {
            "train_batch_size": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "hybrid_engine": {"enabled": True},
        }
        engine: Any = deepspeed.initialize(model=module, config=config)[0]
        given = {"attention_mask": MASK, "pad_token_id": 0, "max_new_tokens": 6, "do_sample": False}
        patch = pytest.MonkeyPatch()
        runs = counted(patch)
        rollouts: Callable[[], Tensor] = lambda: engine.eval().generate(PROMPTS, **given)  # noqa: E731
        try:
            for _ in range(2):
                found = rollouts()
                with deepspeed.zero.GatheredParameters(list(module.parameters())):
                    whole = make("llama")
                    whole.load_state_dict({key: value.clone() for key, value in module.state_dict().items()})
                assert torch.equal(found, whole.eval().generate(PROMPTS, **given))
                assert len([rows for rows in runs if rows == 3]) >= 5
                runs.clear()
                engine.train()
                engine.backward(engine(input_ids=PROMPTS, labels=PROMPTS).loss)
                engine.step()
        finally:
            patch.undo()
        engine.destroy()
