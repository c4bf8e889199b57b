"""On-policy distillation: a student learns from a teacher's probabilities on answers that the student itself gave.

The loss is the generalized Jensen-Shannon divergence of Agarwal et al., "On-Policy Distillation of Language Models:
Learning from Self-Generated Mistakes" (2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.engine.rollout.base import RolloutBatch


@dataclass
class ResponseTokenBatch:
    """Targets of a causal model in a rollout: logits at position ``i`` are for ``target_ids[:, i]``.

    Attributes:
        input_ids: [rows, length], the rollout's.
        attention_mask: [rows, length], the rollout's.
        target_ids: [rows, length - 1], the tokens one position on.
        response_mask: [rows, length - 1] bool, where the target is a token of an answer.
    """

    input_ids: Tensor
    attention_mask: Tensor
    target_ids: Tensor
    response_mask: Tensor

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """ValueError: ``response_start_idx`` holds no positions within the rows behind their first token."""
        first, length = rollout.response_start_idx, rollout.input_ids.shape[1]
        if first.is_floating_point() or first.is_complex() or first.dtype == torch.bool:
            raise ValueError(f"response_start_idx holds positions: an integer dtype, not {first.dtype}")
        outside = first[(first < 1) | (first > length)]
        if outside.numel():
            raise ValueError(
                f"response_start_idx must lie in 1 to {length}, behind a prompt: {outside.tolist()}"
            )
        positions = torch.arange(1, length, device=first.device)
        answered = positions >= first.unsqueeze(1)
        return cls(
            input_ids=rollout.input_ids,
            attention_mask=rollout.attention_mask,
            target_ids=rollout.input_ids[:, 1:],
            response_mask=answered & rollout.attention_mask[:, 1:].bool(),
        )

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """Select, from logits [rows, length, vocabulary], those that have a target. ValueError: another number of rows
        or positions."""
        if logits.dim() != 3 or logits.shape[:2] != self.input_ids.shape:
            rows = tuple(self.input_ids.shape)
            raise ValueError(f"logits {tuple(logits.shape)} do not fit the rows and sequence length {rows}")
        return logits[:, :-1]


@dataclass
class JSDLossOutput:
    """``loss``, the mean over the tokens of answers, and what ranks need to average over all of theirs: the sum
    ``loss_sum`` and ``valid_token_count``."""

    loss: Tensor
    loss_sum: Tensor
    valid_token_count: Tensor


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """``beta KL(teacher | m) + (1 - beta) KL(student | m)`` with ``m = beta teacher + (1 - beta) student``.

    Args:
        student_logits: [rows, length, vocabulary].
        teacher_logits: the same shape; no gradient flows into them.
        response_mask: [rows, length], the tokens that count.
        beta: 0 is KL(teacher | student), 1 is KL(student | teacher).
        temperature: divides both logits.
        teacher_top_k: only the tokens that are most probable for the teacher; both distributions are normalized on
            them.
        pointwise_clip: the most that one token of the vocabulary adds at one position.

    ValueError: shapes that do not fit, or a value out of its range.
    """
    _check(student_logits, teacher_logits, response_mask, beta, temperature, teacher_top_k)
    mask = response_mask.bool()
    student, teacher = student_logits[mask].float(), teacher_logits.detach()[mask].float()
    if teacher_top_k is not None and teacher_top_k < teacher.shape[-1]:
        kept = teacher.topk(teacher_top_k, dim=-1).indices
        student, teacher = student.gather(-1, kept), teacher.gather(-1, kept)
    points = _divergence(
        torch.log_softmax(student / temperature, -1), torch.log_softmax(teacher / temperature, -1), beta
    )
    if pointwise_clip is not None:
        points = points.clamp(max=pointwise_clip)
    count, total = mask.sum(), points.sum()
    return JSDLossOutput(loss=total / count.clamp(min=1), loss_sum=total, valid_token_count=count)


def _divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """By token of the vocabulary, from log-probabilities."""
    if beta == 0:
        return teacher.exp() * (teacher - student)
    if beta == 1:
        return student.exp() * (student - teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)


def _check(
    student: Tensor, teacher: Tensor, mask: Tensor, beta: float, temperature: float, top_k: int | None
) -> None:
    if student.shape != teacher.shape:
        raise ValueError(
            f"student_logits {tuple(student.shape)} and teacher_logits {tuple(teacher.shape)} must have one shape"
        )
    if mask.shape != student.shape[:-1]:
        raise ValueError(f"response_mask {tuple(mask.shape)} does not fit logits {tuple(student.shape)}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta} must lie in 0 to 1")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive")
    if top_k is not None and top_k < 1:
        raise ValueError(f"teacher_top_k={top_k} must be positive, or None for all tokens")
