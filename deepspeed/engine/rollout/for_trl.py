"""Rollouts with continuous batching for TRL's GRPO trainer, as its ``rollout_func``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed.engine.rollout.base import RolloutRequest, SamplingConfig
from deepspeed.engine.rollout.serving_rollout import ServingRollout, ServingRolloutConfig

RolloutFunction = Callable[[list[Any], Any], dict[str, list[Any] | None]]


def rollouts_for_trl(**kwargs: Any) -> RolloutFunction:
    """Return a rollout function for ``GRPOTrainer(..., rollout_func=rollouts_for_trl())``: it generates with
    ``ServingRollout`` over the trainer's engine, with the trainer's temperature, ``top_p``, ``top_k``, length and EOS
    tokens. Log-probabilities are returned only for plain sampling: the trainer expects them after temperature and
    truncation.

    Args:
        kwargs: of ``ServingRolloutConfig``.

    Returns:
        a function of (prompts, trainer), as TRL specifies. It raises ValueError if the trainer has no engine, or
        samples with ``min_p`` or ``repetition_penalty``, which rollouts do not support.
    """
    rollouts: list[ServingRollout] = []

    def answers(prompts: list[Any], trainer: Any) -> dict[str, list[Any] | None]:
        _check(trainer)
        engine, tokenizer = trainer.model_wrapped, trainer.processing_class
        if not rollouts or rollouts[0].engine is not engine:
            ends = list(getattr(trainer, "eos_token_ids", None) or [tokenizer.eos_token_id])
            special = SimpleNamespace(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
            rollouts[:] = [ServingRollout(engine, special, ServingRolloutConfig(**kwargs))]
        prompt_ids = _encoded(prompts, tokenizer)
        plain = trainer.temperature == 1 and trainer.top_p == 1 and not trainer.top_k
        sampling = SamplingConfig(
            trainer.max_completion_length, trainer.temperature, trainer.top_p, trainer.top_k, log_probs=plain
        )
        made = rollouts[0].generate(_padded(prompt_ids, tokenizer.pad_token_id, engine.device), sampling)
        width = int(made.response_start_idx[0])
        lengths = made.attention_mask[:, width:].sum(1).tolist()
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [
                row[:count] for row, count in zip(made.input_ids[:, width:].tolist(), lengths, strict=True)
            ],
            "logprobs": None
            if made.log_probs is None
            else [row[:count] for row, count in zip(made.log_probs.tolist(), lengths, strict=True)],
        }

    return answers


def _check(trainer: Any) -> None:
    if not hasattr(trainer.model_wrapped, "zero_optimization_stage"):
        raise ValueError("rollouts_for_trl: no DeepSpeed engine: set deepspeed= in the trainer's config")
    unknown = [
        name
        for name, plain in (("min_p", (None, 0)), ("repetition_penalty", (None, 1)))
        if getattr(trainer, name, None) not in plain
    ]
    if unknown:
        raise ValueError(f"rollouts_for_trl: {', '.join(unknown)} of the trainer's config: not supported")


def _encoded(prompts: list[Any], tokenizer: Any) -> list[list[int]]:
    """Tokenize texts, or dialogues with the tokenizer's chat template."""
    if isinstance(prompts[0], str):
        return tokenizer(prompts)["input_ids"]
    return [
        tokenizer.apply_chat_template(dialogue, add_generation_prompt=True, tokenize=True, return_dict=False)
        for dialogue in prompts
    ]


def _padded(prompts: list[list[int]], padding: int, device: Any) -> RolloutRequest:
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), padding)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return RolloutRequest(tokens.to(device), mask.to(device))
