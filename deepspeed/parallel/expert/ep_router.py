"""A router by itself, for layers of one's own; ``expert_parallel`` in the config leaves a model's routers alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepspeed.parallel.expert.ep_count import count_tokens_per_expert
from deepspeed.parallel.expert.routers import GROUP_SCORES, scored_routes

__all__ = ["TokenChoiceTopKRouter"]


class TokenChoiceTopKRouter(nn.Module):
    """Each token goes to the ``top_k`` experts of its highest scores.

    Args:
        dim: width of a token.
        num_experts: how many there are.
        num_expert_groups: runs of neighbouring experts; None: a token may use all experts.
        num_limited_groups: how many of these groups a token uses.
        top_k: experts of a token.
        score_func: "softmax" over the experts, or "sigmoid" of each logit.
        route_norm: the scores of a token sum to ``route_scale``.
        route_scale: factor on the scores.
        gate_bias: whether the linear map has a bias.
        group_score_func: a group counts as much as its best expert ("max") or its two best ("top2_sum").

    ``e_score_correction_bias`` [experts] or None is added to the scores where experts are chosen, not where they weigh.

    ValueError: an unknown kind of scores, or groups that do not fit.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        num_expert_groups: int | None,
        num_limited_groups: int | None,
        top_k: int,
        score_func: str,
        route_norm: bool,
        route_scale: float,
        gate_bias: bool,
        group_score_func: str = "top2_sum",
    ) -> None:
        super().__init__()
        if group_score_func not in GROUP_SCORES:
            raise ValueError(
                f"group_score_func={group_score_func!r}: expected one of {', '.join(GROUP_SCORES)}"
            )
        if num_expert_groups is not None and num_limited_groups is None:
            raise ValueError(
                f"num_expert_groups={num_expert_groups}: num_limited_groups says how many of them a token uses"
            )
        self.gate = nn.Linear(dim, num_experts, bias=gate_bias)
        self.num_experts = num_experts
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.top_k = top_k
        self.score_func = score_func
        self.route_norm = route_norm
        self.route_scale = route_scale
        self.group_score_func = group_score_func
        self.e_score_correction_bias = None

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens [T, dim]: scores [T, top_k] fp32, experts [T, top_k], and tokens of each expert [experts] int32.
        ``expert_bias``: added as ``e_score_correction_bias`` is."""
        biases = [each for each in (expert_bias, self.e_score_correction_bias) if each is not None]
        routes = scored_routes(
            self.gate(x),
            self.top_k,
            score=self.score_func,
            bias=torch.stack([each.float() for each in biases]).sum(0) if biases else None,
            groups=self.num_expert_groups or 1,
            groups_used=self.num_limited_groups,
            group_score=self.group_score_func,
            normalize=self.route_norm,
            scale=self.route_scale,
        )
        return routes.weights, routes.experts, count_tokens_per_expert(routes.experts, self.num_experts)
