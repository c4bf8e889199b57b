"""Routing of tokens to experts: the documented gating functions, with index lists instead of one-hot products.

top-1: W. Fedus et al.: Switch Transformers, 2021. top-2: D. Lepikhin et al.: GShard, 2020. top-k with capacity, random
token selection and residual experts: S. Rajbhandari et al.: DeepSpeed-MoE, ICML 2022.

Pure functions of the router's logits, without communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

DROP_POLICIES = ("probs", "position")


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Routing decision for ``S`` tokens with ``k`` choices each among ``E`` experts.

    ``experts`` [S, k], int64; ``weights`` [S, k], the factor on the expert's output, with gradient, 0 where ``kept``
    [S, k] is False (over capacity, or padding). ``exp_counts`` [E], int64: tokens that chose each expert, before
    drops. ``l_aux``: the load-balancing loss, a scalar. ``capacity``: tokens per expert; None: unlimited.
    ``by_choice``: first choices come before second ones in an expert's slots.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor
    exp_counts: Tensor
    l_aux: Tensor
    capacity: int | None
    by_choice: bool = False

    @classmethod
    def of_dense(cls, l_aux: Tensor, combine: Tensor, mask: Tensor, exp_counts: Tensor) -> Routes:
        """Return the routes in the documented ``combine_weights`` and ``dispatch_mask``, [S, E, capacity]."""
        chosen = mask.bool().any(dim=2)
        most = int(chosen.sum(1).max()) if len(chosen) else 0
        experts = chosen.byte().argsort(dim=1, descending=True, stable=True)[:, : max(1, most)]
        kept = chosen.gather(1, experts)
        weights = combine.sum(2).gather(1, experts).masked_fill(~kept, 0.0)
        return cls(experts, weights, kept, exp_counts, l_aux, mask.shape[2])

    def positions(self) -> Tensor:
        """Return the slot of each kept choice in its expert, in token order: [S, k], int64."""
        experts = torch.where(self.kept, self.experts, len(self.exp_counts))
        if self.by_choice:
            return _places(experts.T.reshape(-1)).view(experts.shape[1], -1).T
        return _places(experts.reshape(-1)).view_as(experts)

    def dense(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Return the documented ``combine_weights`` and ``dispatch_mask``, [S, E, capacity]."""
        shape = (len(self.experts), len(self.exp_counts), capacity)
        positions = self.positions()
        rows = torch.arange(shape[0], device=self.experts.device)[:, None].expand_as(self.experts)
        where = (rows[self.kept], self.experts[self.kept], positions[self.kept])
        combine = self.weights.new_zeros(shape).index_put(where, self.weights[self.kept])
        mask = torch.zeros(shape, dtype=torch.bool, device=combine.device)
        mask[where] = True
        return combine, mask


def capacity_of(tokens: int, experts: int, factor: float, minimum: int) -> int:
    """Return ``ceil(tokens / experts x factor)``, at least ``minimum``."""
    return max(math.ceil(tokens / experts * factor), int(minimum))


def top1_routes(
    logits: Tensor,
    capacity: int | None,
    *,
    used_token: Tensor | None = None,
    rsample: bool = False,
    random_selection: bool = True,
) -> Routes:
    """Route each token to the expert of its largest logit [S, E], with the softmax as weight.

    ``rsample``: choose by logits with Gumbel noise. ``random_selection``: a full expert keeps a random selection of
    its tokens; otherwise the first. ``used_token`` [S]: 0 for padding.
    """
    gates = torch.softmax(logits, dim=1)
    judged = logits + gumbel_noise(logits) if rsample else gates
    experts = judged.argmax(dim=1, keepdim=True)
    used = _used(experts, used_token)
    counts = _counts(experts, used, gates.shape[1])
    l_aux = (gates.mean(0) * _shares(counts, gates)).sum() * gates.shape[1]
    random = random_selection and capacity is not None
    priority = torch.rand(len(experts), device=gates.device) if random else None
    kept = _kept(experts, used, gates.shape[1], capacity, priority)
    return _routes(gates, experts, kept, counts, l_aux, capacity)


def top2_routes(
    logits: Tensor, capacity: int | None, *, used_token: Tensor | None = None, sample_second: bool = True
) -> Routes:
    """Route each token to the expert of its largest logit and to a second one: the largest other logit, with Gumbel
    noise if ``sample_second``. First choices take precedence over second ones. Weights are the softmax, normalized to
    sum to 1 over the kept choices."""
    gates = torch.softmax(logits, dim=1)
    first = gates.argmax(dim=1, keepdim=True)
    judged = logits + gumbel_noise(logits) if sample_second else logits
    second = judged.detach().scatter(1, first, float("-inf")).argmax(dim=1, keepdim=True)
    experts = torch.cat([first, second], dim=1)
    used = _used(experts, used_token)
    counts = _counts(experts, used, gates.shape[1])
    first_counts = _counts(first, used[:, :1], gates.shape[1])
    l_aux = (gates.mean(0) * _shares(first_counts, gates)).mean() * gates.shape[1] ** 2
    kept = _kept(experts.T, used.T, gates.shape[1], capacity, None).T
    return _normalized(replace(_routes(gates, experts, kept, counts, l_aux, capacity), by_choice=True))


def topk_routes(
    logits: Tensor,
    k: int,
    capacity: int | None,
    *,
    used_token: Tensor | None = None,
    drop_policy: str = "probs",
) -> Routes:
    """Route each token to the experts of its ``k`` largest logits. A full expert keeps the tokens of the largest
    softmax (``drop_policy`` "probs") or the first ("position"). Weights are the softmax, normalized to sum to 1 over
    the kept choices."""
    if drop_policy not in DROP_POLICIES:
        raise ValueError(f"drop_policy={drop_policy!r}: expected one of {', '.join(DROP_POLICIES)}")
    gates = torch.softmax(logits, dim=1)
    experts = logits.topk(k, dim=1).indices
    used = _used(experts, used_token)
    counts = _counts(experts, used, gates.shape[1])
    l_aux = (gates.mean(0) * _shares(counts, gates)).mean() * gates.shape[1] ** 2 / k
    judged = capacity is not None and drop_policy == "probs"
    priority = gates.detach().gather(1, experts).reshape(-1) if judged else None
    kept = _kept(experts, used, gates.shape[1], capacity, priority)
    return _normalized(_routes(gates, experts, kept, counts, l_aux, capacity))


def gumbel_noise(like: Tensor) -> Tensor:
    """Sample the standard Gumbel distribution, in the shape of ``like``."""
    uniform = torch.rand_like(like).clamp_(min=torch.finfo(like.dtype).tiny)
    return -torch.log(-torch.log(uniform).clamp_(max=-torch.finfo(like.dtype).tiny))


def _routes(
    gates: Tensor, experts: Tensor, kept: Tensor, counts: Tensor, l_aux: Tensor, capacity: int | None
) -> Routes:
    weights = gates.gather(1, experts).masked_fill(~kept, 0.0)
    return Routes(experts, weights, kept, counts, l_aux, capacity)


def _normalized(routes: Routes) -> Routes:
    total = routes.weights.sum(1, keepdim=True)
    return replace(routes, weights=routes.weights / total.clamp(min=torch.finfo(total.dtype).eps))


def _used(experts: Tensor, used_token: Tensor | None) -> Tensor:
    if used_token is None:
        return torch.ones_like(experts, dtype=torch.bool)
    if used_token.numel() != len(experts):
        raise ValueError(f"used_token has {used_token.numel()} entries for {len(experts)} tokens")
    return (used_token.reshape(-1, 1) != 0).expand_as(experts)


def _counts(experts: Tensor, used: Tensor, count: int) -> Tensor:
    return torch.bincount(experts[used], minlength=count)


def _shares(counts: Tensor, gates: Tensor) -> Tensor:
    """Return the fraction of tokens that chose each expert."""
    return counts.to(gates.dtype) / len(gates)


def _kept(experts: Tensor, used: Tensor, count: int, capacity: int | None, priority: Tensor | None) -> Tensor:
    """Return which of the ``used`` choices [n, k] are within each expert's ``capacity`` (None: all): the first ones, or
    those of the highest ``priority`` [n * k]."""
    if capacity is None:
        return used
    flat = torch.where(used, experts, count).reshape(-1)
    if priority is None:
        return used & (_places(flat) < capacity).view_as(experts)
    order = priority.argsort(descending=True, stable=True)
    fits = torch.empty_like(flat, dtype=torch.bool)
    fits[order] = _places(flat[order]) < capacity
    return used & fits.view_as(experts)


def _places(experts: Tensor) -> Tensor:
    """Return the number of earlier equal entries for each entry, [n]."""
    order = experts.argsort(stable=True)
    ordered = experts[order]
    numbers = torch.arange(len(experts), device=experts.device)
    starts = torch.zeros_like(numbers)
    if len(experts):
        new = torch.ones_like(experts, dtype=torch.bool)
        new[1:] = ordered[1:] != ordered[:-1]
        starts = torch.where(new, numbers, 0).cummax(0).values
    places = torch.empty_like(numbers)
    places[order] = numbers - starts
    return places
