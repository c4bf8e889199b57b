"""Distillation on the student's own answers, against probabilities by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deepspeed.engine.rollout import (
    ResponseTokenBatch,
    RolloutBatch,
    RolloutConfig,
    SamplingConfig,
    build_rollout,
    generalized_jsd_loss,
)


def rollout(starts: list[int], mask: Tensor | None = None) -> RolloutBatch:
    tokens = torch.arange(len(starts) * 5).view(len(starts), 5)
    return RolloutBatch(tokens, torch.ones_like(tokens) if mask is None else mask, torch.tensor(starts))


def test_targets_are_the_tokens_of_the_answers() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    batch = ResponseTokenBatch.from_rollout(rollout([2, 4], mask))
    assert batch.target_ids.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    expected = [[False, True, True, False], [False, False, False, True]]
    assert batch.response_mask.tolist() == expected
    logits = torch.randn(2, 5, 7)
    assert torch.equal(batch.select_causal_logits(logits), logits[:, :4])
    with pytest.raises(ValueError, match="sequence length"):
        batch.select_causal_logits(logits[:, :4])


@pytest.mark.parametrize("start", [torch.tensor([0]), torch.tensor([6]), torch.tensor([2.0])])
def test_answers_begin_behind_a_prompt(start: Tensor) -> None:
    tokens = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="response_start_idx"):
        ResponseTokenBatch.from_rollout(RolloutBatch(tokens, torch.ones_like(tokens), start))


def by_hand(student: list[float], teacher: list[float], beta: float, clip: float = math.inf) -> float:
    mixed = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    total = 0.0
    for s, t, m in zip(student, teacher, mixed, strict=True):
        if beta == 0:
            point = t * math.log(t / s)
        elif beta == 1:
            point = s * math.log(s / t)
        else:
            point = beta * t * math.log(t / m) + (1 - beta) * s * math.log(s / m)
        total += min(point, clip)
    return total


STUDENT, TEACHER = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]], [[0.5, 0.1, 0.4], [0.7, 0.2, 0.1]]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_loss_is_that_by_hand(beta: float, clip: float | None) -> None:
    made = generalized_jsd_loss(
        torch.tensor([STUDENT]).log() + 3.0,
        torch.tensor([TEACHER]).log(),
        torch.tensor([[1, 1]]),
        beta=beta,
        pointwise_clip=clip,
    )
    expected = [by_hand(s, t, beta, clip or math.inf) for s, t in zip(STUDENT, TEACHER, strict=True)]
    assert made.valid_token_count.item() == 2
    assert made.loss_sum.item() == pytest.approx(sum(expected), rel=1e-5)
    assert made.loss.item() == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_the_teachers_best_tokens_and_the_temperature() -> None:
    student, teacher = torch.tensor([STUDENT]).log(), torch.tensor([TEACHER]).log()
    best = generalized_jsd_loss(student, teacher, torch.tensor([[1, 0]]), beta=0.0, teacher_top_k=2)
    assert best.loss.item() == pytest.approx(
        by_hand([0.6 / 0.7, 0.1 / 0.7], [0.5 / 0.9, 0.4 / 0.9], 0.0), rel=1e-5
    )
    hot = generalized_jsd_loss(student, teacher, torch.tensor([[1, 0]]), beta=0.0, temperature=2.0)
    roots = [[math.sqrt(p) for p in row] for row in (STUDENT[0], TEACHER[0])]
    s, t = ([p / sum(row) for p in row] for row in roots)
    assert hot.loss.item() == pytest.approx(by_hand(s, t, 0.0), rel=1e-5)


def test_gradients_reach_the_student_alone_and_no_token_gives_none() -> None:
    student = torch.randn(2, 3, 5, requires_grad=True)
    teacher = torch.randn(2, 3, 5, requires_grad=True)
    mask = torch.tensor([[1, 0, 0], [0, 0, 0]])
    generalized_jsd_loss(student, teacher, mask).loss.backward()
    assert teacher.grad is None and student.grad is not None
    assert (
        student.grad[0, 0].abs().sum() > 0
        and student.grad[0, 1:].abs().sum() + student.grad[1].abs().sum() == 0
    )
    empty = generalized_jsd_loss(student, teacher, torch.zeros_like(mask))
    empty.loss.backward()
    assert empty.loss.item() == 0 and empty.valid_token_count.item() == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [({"beta": 2.0}, "beta"), ({"temperature": 0}, "temperature"), ({"teacher_top_k": 0}, "top_k")],
)
def test_values_out_of_range(options: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        generalized_jsd_loss(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(1, 2), **options)  # pyright: ignore[reportArgumentType]


def test_any_object_says_which_engine_generates() -> None:
    settings = SimpleNamespace(engine="hybrid_engine", max_prompt_length=8)
    made = build_rollout(settings, SimpleNamespace(module=None), None)  # pyright: ignore[reportArgumentType]
    assert made.name == RolloutConfig().engine
    assert SamplingConfig(max_new_tokens=4, continuous_batch_size=2).n_samples_per_prompt == 1
