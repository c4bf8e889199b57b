"""Interface of rollout engines, with their requests and results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class RolloutConfig:
    """Selects the rollout engine: ``hybrid_engine`` (the model's own ``generate``), ``serving`` (continuous batching)
    or ``serving_ahead`` (the same, concurrently with training). ``use_graph_capture`` has no effect."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class SamplingConfig:
    """Sampling parameters.

    Attributes:
        max_new_tokens: maximum tokens of an answer.
        temperature: 0 selects the most probable token.
        top_p: sample from the smallest set of tokens with at least this total probability; 1: from all.
        top_k: sample from this number of most probable tokens; -1: from all.
        n_samples_per_prompt: answers per prompt, adjacent in the batch.
        continuous_batch_size: no effect: ``RolloutConfig("serving")`` batches continuously, within its own limits.
        log_probs: return the log-probability of every answer token, before temperature and truncation.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None
    log_probs: bool = False


def _check_rows(name: str, tokens: Tensor, mask_name: str, mask: Tensor) -> None:
    """Check shapes. ValueError: ``tokens`` is not [rows, length], or the mask has another shape."""
    if tokens.dim() != 2:
        raise ValueError(f"{name} must be 2-D [rows, length], not {tuple(tokens.shape)}")
    if mask.shape != tokens.shape:
        raise ValueError(
            f"{mask_name} of shape {tuple(mask.shape)} does not match {name} of shape {tuple(tokens.shape)}"
        )


@dataclass
class RolloutRequest:
    """``prompt_ids`` [prompts, width], left-padded, and ``prompt_attention_mask`` of the same shape.

    ``seeds``: one per answer, each of which then does not depend on anything else, such as the number of ranks; None:
    draw from torch's default generator. Not supported by the hybrid engine.
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
        input_ids: [rows, length], each a left-padded prompt and its answer.
        attention_mask: [rows, length], 0 for padding before the prompt and after the token that ends the answer.
        response_start_idx: [rows], index of each answer's first token.
        log_probs: [rows, length - prompt width], float32, 0 after the end; None unless requested.
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
    """Generates with the weights of the last ``sync_weights``."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Generate answers to the prompts of ``request``."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Take the weights after training step ``step``."""

    def shutdown(self) -> None:  # noqa: B027 - most engines have nothing to free
        """Free the engine's resources."""


# Ends of answers, and the padding after them.


def special_tokens(tokenizer: Any, module: Any) -> tuple[list[int], int]:
    """Return the tokens that end an answer, and the padding token: of ``tokenizer``, else of the generation config of
    ``module``."""
    source = tokenizer if tokenizer is not None else module.generation_config
    found = source.eos_token_id
    ends = [] if found is None else [found] if isinstance(found, int) else list(found)
    padding = source.pad_token_id
    return ends, padding if padding is not None else ends[0] if ends else 0


def until_the_end(answers: Tensor, ends: list[int]) -> Tensor:
    """Return a mask [rows, length]: 1 up to and including the first of ``ends``, 0 after it."""
    ended = torch.isin(answers, torch.tensor(ends, dtype=answers.dtype, device=answers.device)).int()
    return (ended.cumsum(1) - ended == 0).int()


# Off-policy corrections: answers generated by older weights, or by other arithmetic.


def importance_weights(
    training: Tensor, rollout: Tensor, mask: Tensor, *, cap: float = 2.0, level: str = "token"
) -> Tensor:
    """Return importance weights: the ratio of each answer's probability under the trained model to that under the model
    that generated it, at most ``cap`` (truncated importance sampling, E. L. Ionides, 2008). Multiply the loss of a
    stale rollout by them. The cap keeps a rare token from dominating the step; its bias is small if the models are
    close.

    Args:
        training: [rows, length] log-probabilities of the answers' tokens under the weights at the start of the update.
        rollout: those at generation (``RolloutBatch.log_probs``).
        mask: 1 for tokens to count.
        cap: above 0.
        level: ``token``: a ratio per token; ``sequence``: one ratio per answer, the same for all its tokens.

    Returns:
        [rows, length] float32 without gradient, 0 where ``mask`` is 0.

    Raises:
        ValueError: an unknown ``level``, or a ``cap`` of 0 or less.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r}: use 'token' or 'sequence'")
    if not cap > 0:
        raise ValueError(f"cap={cap}: must be above 0")
    log_ratio = _counted(training.detach().float() - rollout.detach().float(), mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    limit = torch.tensor(cap, device=log_ratio.device).log()
    return log_ratio.clamp(max=limit).exp() * mask


def _counted(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` times ``mask``, 0 where that is 0: padding may have log-probabilities of -inf or NaN."""
    return (values * mask).masked_fill(mask == 0, 0.0)


def rollout_mismatch(training: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure the difference between log-probabilities at generation and in the training forward with the same weights,
    caused by another summation order or precision.

    Args:
        training: [rows, length] log-probabilities of the answers' tokens under the trained model.
        rollout: those at generation (``RolloutBatch.log_probs``).
        mask: 1 for tokens to count.

    Returns:
        ``largest`` and ``mean`` of the absolute differences; ``kl``: the mean of rollout minus training, an estimate of
        KL(rollout || training).
    """
    log_ratio = _counted(rollout.detach().double() - training.detach().double(), mask)
    count = max(float(mask.sum()), 1.0)
    largest = log_ratio.abs().max().item() if log_ratio.numel() else 0.0
    return {
        "largest": largest,
        "mean": log_ratio.abs().sum().item() / count,
        "kl": log_ratio.sum().item() / count,
    }
