"""Models whose attention depends on the length of the whole sequence: each prompt gets what `generate` gives it alone.

The rotations of Phi-3 and Phi-MoE (longrope) change for all tokens of a sequence when it becomes longer than the
original length, here 32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.model import packed, padded
from deepspeed.inference.model.info import LayoutError
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.inference.scheduling.requests import SamplingParams
from deepspeed.inference.v2 import engine_v2
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig
from deepspeed.inference.v2.engine_v2 import InferenceEngineV2
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import make  # noqa: E402

ORIGINAL, NEW = 32, 10
_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 1}
_MSCALE = {"original_max_position_embeddings": ORIGINAL, "short_mscale": 1.1, "long_mscale": 1.7}


def longrope(kind: str) -> Any:
    configs = {
        "phi3": ("Phi3Config", {"original_max_position_embeddings": ORIGINAL, "rope_parameters": _ROPE}),
        "phimoe": ("PhimoeConfig", {**_PHIMOE, "rope_parameters": {**_ROPE, **_MSCALE}}),
        "llama": (
            "LlamaConfig",
            {"rope_parameters": {**_ROPE, "original_max_position_embeddings": ORIGINAL}},
        ),
    }
    name, more = configs[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**_SHAPE, **more))
    for param in model.parameters():
        torch.nn.init.normal_(param, 0.7 if param.ndim == 1 else 0.0, 0.3)
    return model.eval()


def prompt(length: int, first: int = 0) -> list[int]:
    return [3 + (first + 7 * at + at * at) % 90 for at in range(length)]


PROMPTS = [prompt(20), prompt(45), prompt(25, 5), prompt(32, 2), prompt(33, 3), prompt(40)]
"""Shorter and longer than the original length, growing beyond it (25 + 10), just at it; beginnings are shared."""


def alone(model: Any, tokens: list[int]) -> list[int]:
    found = model.generate(
        torch.tensor([tokens]), max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones(1, len(tokens))
    )
    return found[0, len(tokens) :].tolist()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("phi3", packed.PackedLayout), ("phi3", padded.PaddedLayout), ("phimoe", packed.PackedLayout)],
)
def test_a_prompt_gets_what_it_gets_alone(kind: str, layout: Any) -> None:
    """Also in chunks (a forward has 24 tokens), with beginnings in the prefix cache, with too few blocks, and one by
    one."""
    model = longrope(kind)
    wanted = [alone(model, tokens) for tokens in PROMPTS]
    runner = ModelRunner(model, 4, layouts=(layout,))
    params = SamplingParams(max_new_tokens=NEW)
    generator = Generator(runner, token_budget=24, max_sequences=6, num_blocks=200)
    for _ in range(2):
        assert [each.generated for each in generator.generate(PROMPTS, params)] == wanted
    assert generator.counts.shared_tokens > 0
    assert [generator.generate([tokens], params)[0].generated for tokens in PROMPTS[:3]] == wanted[:3]
    scarce = Generator(runner, token_budget=24, max_sequences=6, num_blocks=40)
    assert [each.generated for each in scarce.generate(PROMPTS, params)] == wanted
    assert alone(model, PROMPTS[2]) == wanted[2]  # the model is as it was


@pytest.mark.parametrize("blocks", [None, 20])
def test_clients_that_schedule_themselves(blocks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of different lengths in one `put`, prompts in parts, and growth beyond the original length; with few
    blocks one after the other, while those of the others are in host memory."""
    monkeypatch.setattr(engine_v2, "BLOCK_SIZE", 4)
    model = longrope("phi3")
    manager = {"offload": True, "memory_config": {"mode": "allocate", "size": blocks}} if blocks else {}
    engine = engine_of(model, state_manager=manager)
    every = list(range(len(PROMPTS)))
    rest = [tokens[: len(tokens) // 2] for tokens in PROMPTS]
    found: list[list[int]] = [[] for _ in every]
    for step in range(NEW + 1):
        for uids in [[uid] for uid in every] if blocks else [every]:
            logits = engine.put(uids, [torch.tensor(rest[uid]) for uid in uids])
            for uid, row in zip(uids, logits, strict=True):
                rest[uid] = [int(row.argmax())] if step else PROMPTS[uid][len(rest[uid]) :]
                found[uid] += rest[uid] if step else []
    assert found == [alone(model, tokens) for tokens in PROMPTS]
    assert not blocks or engine.blocks_moved > 0


def engine_of(model: Any, **config: Any) -> Any:
    class Given:
        def build_model(self) -> Any:
            return model

    return InferenceEngineV2(Given(), RaggedInferenceEngineConfig(**config))  # type: ignore[arg-type]


def test_growth_that_generate_computes_with_wrong_keys_is_refused() -> None:
    """Of a Llama with longrope, `generate` keeps the keys that were rotated for a short sequence."""
    model = longrope("llama")
    generator = Generator(model, block_size=4, num_blocks=100, token_budget=24, max_sequences=6)
    params = SamplingParams(max_new_tokens=NEW)
    fitting = [PROMPTS[0], PROMPTS[1], PROMPTS[4]]  # 20 and 10, of which the last is not computed; 45; 33
    assert [each.generated for each in generator.generate(fitting, params)] == [
        alone(model, tokens) for tokens in fitting
    ]
    with pytest.raises(ValueError, match="25 tokens would grow to 34, beyond the 32"):
        generator.submit(PROMPTS[2], params)
    engine = engine_of(model)
    engine.put([0], [torch.tensor(PROMPTS[3])])
    with pytest.raises(ValueError, match="32 tokens would grow to 33, beyond the 32"):
        engine.put([0], [torch.tensor([5])])


def test_switches_in_modules_of_unknown_code_are_refused() -> None:
    model = longrope("phi3")
    del model.model.rotary_emb.rope_type
    with pytest.raises(LayoutError, match="rotations of type longrope"):
        ModelRunner(model)


def test_the_trial_crosses_the_length() -> None:
    """A layout that rotates by what it is given only is refused."""

    class Deaf(packed.PackedLayout):
        name = "deaf"

        def forward(self, pieces: Any, cache: Any, unchanged: bool = False) -> torch.Tensor:
            rotary = self.module.model.rotary_emb
            hooks = rotary._forward_pre_hooks.copy(), rotary._forward_hooks.copy()
            rotary._forward_pre_hooks.clear()
            rotary._forward_hooks.clear()
            try:
                return super().forward(pieces, cache, unchanged)
            finally:
                rotary._forward_pre_hooks.update(hooks[0])
                rotary._forward_hooks.update(hooks[1])

    with pytest.raises(LayoutError, match="deaf: logits differ"):
        ModelRunner(longrope("phi3"), layouts=(Deaf,))


@pytest.mark.parametrize("layout", [packed.PackedLayout, padded.PaddedLayout])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "phi3"])
def test_the_trial_crosses_sliding_windows(name: str, layout: Any) -> None:
    """A layout that sees all tokens is refused, though the trial has fewer than the model's window."""

    class Blind(layout):
        name = "blind"

        def forward(self, pieces: Any, cache: Any, unchanged: bool = False) -> torch.Tensor:
            owners = [
                each for each in (self.info.config, *self.module.modules()) if hasattr(each, "sliding_window")
            ]
            before = [each.sliding_window for each in owners]
            for each in owners:
                each.sliding_window = each.sliding_window and 1000
            found = super().forward(pieces, cache, unchanged)
            for each, window in zip(owners, before, strict=True):
                each.sliding_window = window
            return found

    model: Any = make(name, sliding_window=512).eval()
    windows = [getattr(each, "sliding_window", None) for each in (model.config, *model.modules())]
    assert ModelRunner(model, layouts=(layout,)).layout.name == layout.name
    with pytest.raises(LayoutError, match="blind: logits differ"):
        ModelRunner(model, layouts=(Blind,))
    assert windows == [getattr(each, "sliding_window", None) for each in (model.config, *model.modules())]


@distributed(world_size=2)
def test_prompts_of_ranks_that_share_layers_while_generating() -> None:
    """The engine for rollouts joins them to one batch, padded to the longest."""
    from tests.clients.test_hybrid_engine import engine_of as hybrid

    tokens, model = PROMPTS[torch.distributed.get_rank()], longrope("phi3")
    wanted = alone(model, tokens)
    engine = hybrid(model, 0, inference_tp_size=2).eval()
    greedy = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    found = engine.generate(torch.tensor([tokens]), generation_config=greedy)
    assert found[0, len(tokens) :].tolist() == wanted
    engine.destroy()
