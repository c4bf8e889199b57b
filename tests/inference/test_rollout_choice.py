"""Selection of the engine of a rollout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepspeed.engine.rollout import RolloutConfig, RolloutRequest, SamplingConfig, build_rollout


def test_any_object_says_which_engine_generates() -> None:
    settings = SimpleNamespace(engine="hybrid_engine", max_prompt_length=8)
    made = build_rollout(settings, SimpleNamespace(module=None), None)  # pyright: ignore[reportArgumentType]
    assert made.name == RolloutConfig().engine
    assert SamplingConfig(max_new_tokens=4, continuous_batch_size=2).n_samples_per_prompt == 1


def count_on(
    input_ids: Tensor, max_new_tokens: int, do_sample: bool, num_return_sequences: int = 1, **_: Any
) -> Tensor:
    """Continue prompts with the numbers after their last token. As Transformers, repeat rows only to sample."""
    assert do_sample or num_return_sequences == 1
    rows = input_ids.repeat_interleave(num_return_sequences, 0)
    return torch.cat([rows, rows[:, -1:] + torch.arange(1, max_new_tokens + 1)], 1)


def test_several_greedy_answers_to_a_prompt_are_equal() -> None:
    engine = SimpleNamespace(
        module=None, training=False, eval=lambda: None, train=lambda mode: None, generate=count_on
    )
    tokenizer = SimpleNamespace(eos_token_id=None, pad_token_id=0)
    prompts = torch.tensor([[0, 3], [5, 7]])
    made = build_rollout(RolloutConfig(), engine, tokenizer).generate(
        RolloutRequest(prompts, (prompts > 0).long()),
        SamplingConfig(2, temperature=0.0, n_samples_per_prompt=2),
    )
    assert made.input_ids.tolist() == [[0, 3, 4, 5]] * 2 + [[5, 7, 8, 9]] * 2
    assert made.attention_mask.tolist() == [[0, 1, 1, 1]] * 2 + [[1, 1, 1, 1]] * 2
