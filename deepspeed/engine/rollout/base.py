"""The interface of rollout engines: their requests and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class RolloutConfig:
    """The engine that generates: ``hybrid_engine`` (the model's own ``generate``), ``serving`` (continuous batching) or
    ``serving_ahead`` (the same while training goes on). ``use_graph_capture`` has no effect."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class SamplingConfig:
    """Parameters of sampling.

    Attributes:
        max_new_tokens: of an answer.
        temperature: 0 takes the most probable token.
        top_p: the smallest set of tokens that has this probability; 1: all.
        top_k: the most probable ones only; -1: all.
        n_samples_per_prompt: answers to each prompt, next to each other in the batch.
        continuous_batch_size: no effect: ``RolloutConfig("serving")`` batches continuously, within its own limits.
        log_probs: return the log-probability of every token of the answers, before temperature and truncation.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None
    log_probs: bool = False


def _check_rows(name: str, tokens: Tensor, mask_name: str, mask: Tensor) -> None:
    """ValueError: not [rows, length], or a mask of another shape."""
    if tokens.dim() != 2:
        raise ValueError(f"{name} must be 2-D [rows, length], not {tuple(tokens.shape)}")
    if mask.shape != tokens.shape:
        raise ValueError(
            f"{mask_name} of shape {tuple(mask.shape)} does not match {name} of shape {tuple(tokens.shape)}"
        )


@dataclass
class RolloutRequest:
    """``prompt_ids [prompts, width]``, padded on the left, and ``prompt_attention_mask`` of the same shape.

    ``seeds``: of the draws of each answer, which then depend on nothing else, such as the number of ranks; None: they
    come from torch's default generator. Not for the hybrid engine.
    """

    prompt_ids: Tensor
    prompt_attention_mask: Tensor
    seeds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_rows("prompt_ids", self.prompt_ids, "prompt_attention_mask", self.prompt_attention_mask)


@dataclass
class RolloutBatch:
    """Prompts with their answers.

    Attributes:
        input_ids: [rows, length], a prompt that is padded on the left, then its answer.
        attention_mask: [rows, length]: 0 on the left of the prompt, and behind the token that ends the answer.
        response_start_idx: [rows], where the answers begin.
        log_probs: [rows, length - prompt's width] float32, 0 behind the end; None unless asked for.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor
    log_probs: Tensor | None = None

    def __post_init__(self) -> None:
        _check_rows("input_ids", self.input_ids, "attention_mask", self.attention_mask)
        if tuple(self.response_start_idx.shape) != (self.batch_size,):
            raise ValueError(
                f"response_start_idx must be 1-D of length {self.batch_size}, one for each row of input_ids, not "
                f"{tuple(self.response_start_idx.shape)}"
            )

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]


class RolloutEngine(ABC):
    """Generates with the weights that ``sync_weights`` gave it last."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answers to the prompts of ``request``."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Take the weights after training step ``step``."""

    def shutdown(self) -> None:  # noqa: B027 - most have nothing to end
        """Give back what is held."""


# Ends of answers, and the padding behind them.


def special_tokens(tokenizer: Any, module: Any) -> tuple[list[int], int]:
    """Tokens that end an answer, and the one behind the end: of ``tokenizer``, else of the generation config of
    ``module``."""
    source = tokenizer if tokenizer is not None else module.generation_config
    found = source.eos_token_id
    ends = [] if found is None else [found] if isinstance(found, int) else list(found)
    padding = source.pad_token_id
    return ends, padding if padding is not None else ends[0] if ends else 0


def until_the_end(answers: Tensor, ends: list[int]) -> Tensor:
    """[rows, length]: 1 up to and with the first of ``ends``, 0 behind."""
    ended = torch.isin(answers, torch.tensor(ends, dtype=answers.dtype, device=answers.device)).int()
    return (ended.cumsum(1) - ended == 0).int()


# Learning from answers that other weights, or other arithmetic, gave.


def importance_weights(
    training: Tensor, rollout: Tensor, mask: Tensor, *, cap: float = 2.0, level: str = "token"
) -> Tensor:
    """Return importance weights: how much more probable each answer is for the model that learns than for the one that
    gave it, at most ``cap`` (truncated importance sampling, E. L. Ionides, 2008). They multiply the loss of a stale
    rollout. The cap keeps a rare token from deciding the step; the bias that it leaves is small where the two are near.

    Args:
        training: [rows, length] log-probabilities of the answers' tokens by the weights at the beginning of the update.
        rollout: those that generation had (``RolloutBatch.log_probs``).
        mask: 1 where a token counts.
        cap: above 0.
        level: ``token``: of each token alone; ``sequence``: of the whole answer, the same for its tokens.

    Returns:
        [rows, length] float32 without gradient, 0 where ``mask`` is.

    Raises:
        ValueError: another ``level``, or a ``cap`` that is not above 0.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r}: use 'token' or 'sequence'")
    if not cap > 0:
        raise ValueError(f"cap={cap}: has to be above 0")
    log_ratio = (training.detach().float() - rollout.detach().float()) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    limit = torch.tensor(cap, device=log_ratio.device).log()
    return log_ratio.clamp(max=limit).exp() * mask


def rollout_mismatch(training: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure how far the log-probabilities of generation are from those of the training forward with the same weights:
    the effect of another order of sums, or of another precision.

    Args:
        training: [rows, length] log-probabilities of the answers' tokens, by the model that learns.
        rollout: those that generation had (``RolloutBatch.log_probs``).
        mask: 1 where a token counts.

    Returns:
        ``largest`` and ``mean``: of the differences without sign; ``kl``: the mean of rollout minus training, an
        estimate of the divergence of the one from the other.
    """
    log_ratio = (rollout.detach().double() - training.detach().double()) * mask
    count = max(float(mask.sum()), 1.0)
    largest = log_ratio.abs().max().item() if log_ratio.numel() else 0.0
    return {
        "largest": largest,
        "mean": log_ratio.abs().sum().item() / count,
        "kl": log_ratio.sum().item() / count,
    }
