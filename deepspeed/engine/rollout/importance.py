"""Learning from answers that other weights, or other arithmetic, gave."""

from __future__ import annotations

import torch
from torch import Tensor


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
    apart = (training.detach().float() - rollout.detach().float()) * mask
    if level == "sequence":
        apart = apart.sum(1, keepdim=True)
    limit = torch.tensor(cap, device=apart.device).log()
    return apart.clamp(max=limit).exp() * mask


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
    apart = (rollout.detach().double() - training.detach().double()) * mask
    count = max(float(mask.sum()), 1.0)
    largest = apart.abs().max().item() if apart.numel() else 0.0
    return {"largest": largest, "mean": apart.abs().sum().item() / count, "kl": apart.sum().item() / count}
