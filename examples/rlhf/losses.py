"""The arithmetic of learning from preferences: pure functions of tensors.

Shapes: ``rows`` dialogues of ``length`` tokens. ``mask`` is 1 where a token counts, in each row from one place to
another. Means are taken in each row first and then over rows, so that ranks with equally many rows average to the mean
of all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def wide(values: Tensor) -> Tensor:
    """In float32, or float64 if that is what they have."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """[rows, length - 1], wide: of each token but the first, given those before it."""
    return wide(logits[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


def positions_of(mask: Tensor) -> Tensor:
    """Of tokens that may be padded on the left: the first that counts is 0."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` is 1: of each row, then of the rows; an empty row counts as 0."""
    return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def last(mask: Tensor) -> Tensor:
    """[rows]: the last place of each row at which ``mask`` is 1."""
    places = torch.arange(mask.shape[1], device=mask.device)
    return (places * mask).argmax(1)


def shaped_rewards(
    scores: Tensor, log_probs: Tensor, reference: Tensor, mask: Tensor, kl_coef: float, clip: float
) -> Tensor:
    """[rows, length]: for each token what it costs to leave the reference, and with the last one the score, which is
    clipped to ``[-clip, clip]`` (L. Ouyang et al.: InstructGPT, 2022)."""
    rewards = -kl_coef * (log_probs - reference) * mask
    ends = last(mask)[:, None]
    return rewards.scatter_add(1, ends, scores.clamp(-clip, clip)[:, None].to(rewards.dtype))


def advantages_and_returns(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates (J. Schulman et al., 2015) and what the values should have been, both
    [rows, length] and 0 where ``mask`` is. After the last token nothing is expected."""
    values, rewards = values * mask, rewards * mask
    found, running = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for at in reversed(range(values.shape[1])):
        following = values[:, at + 1] if at + 1 < values.shape[1] else torch.zeros_like(running)
        running = (rewards[:, at] + gamma * following - values[:, at] + gamma * lam * running) * mask[:, at]
        found[:, at] = running
    return found, (found + values) * mask


def clipped_policy_loss(
    now: Tensor, then: Tensor, advantages: Tensor, mask: Tensor, clip: float, weights: Tensor | float = 1.0
) -> Tensor:
    """The pessimistic one of the plain and the clipped ratio (PPO; J. Schulman et al., 2017).

    Args:
        weights: of tokens that another model drew than the one that had ``then`` (J. Hilton et al., 2022).
    """
    ratio = ((now - then) * mask).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
    return row_mean(losses * weights, mask)


def clipped_value_loss(now: Tensor, then: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Half the squared error, also of values that moved no further than ``clip``; the larger one counts."""
    near = then + (now - then).clamp(-clip, clip)
    return 0.5 * row_mean(torch.maximum((now - returns) ** 2, (near - returns) ** 2), mask)


def reference_penalty(now: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """The estimate of the KL divergence that is never negative (k3; J. Schulman, 2020), as GRPO uses it."""
    apart = (reference - now) * mask
    return row_mean(apart.exp() - apart - 1, mask)


def group_advantages(scores: Tensor, size: int, kind: str) -> Tensor:
    """[rows], from the scores of ``size`` answers to each prompt, which are next to each other.

    Args:
        kind: ``grpo``: distance from the group's mean in standard deviations (Z. Shao et al., 2024); ``rloo``: distance
            from the mean of the others (A. Ahmadian et al., 2024).
    """
    groups = scores.view(-1, size)
    if kind == "grpo":
        found = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    else:
        found = (groups - groups.mean(1, keepdim=True)) * size / (size - 1)
    return found.flatten()


def preference_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Of the scores [pairs] of a reward model (Bradley and Terry)."""
    return -logsigmoid(chosen - rejected).mean()


def direct_preference_loss(now: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """DPO (R. Rafailov et al., 2023): loss and mean margin, from the summed log-probabilities of the answers
    [2 * pairs], first all that were chosen."""
    chosen, rejected = (beta * (now - reference)).chunk(2)
    return preference_loss(chosen, rejected), (chosen - rejected).mean().detach()
