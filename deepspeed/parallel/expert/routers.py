"""Routers besides the documented gates: sigmoid scores, group-limited routing, bias balancing, z-loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.comm.documented_groups import get_mesh
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.parallel.expert.routes import Routes

SCORES = ("softmax", "sigmoid")


def router_z_loss(logits: Tensor) -> Tensor:
    """Return the mean over tokens of the squared log-sum-exp of router logits [S, E], an fp32 scalar that keeps them
    small when added to the loss with a coefficient such as 1e-3.

    B. Zoph et al.: ST-MoE: Designing stable and transferable sparse expert models, 2022.
    """
    return torch.logsumexp(logits.float(), dim=-1).square().mean()


def scored_routes(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    groups_used: int | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    used_token: Tensor | None = None,
) -> Routes:
    """Route each token of ``logits`` [S, E] to the ``k`` experts with its highest scores; no token is dropped.

    Args:
        score: "softmax" over the experts, or "sigmoid" of each logit.
        bias: [E], added to the scores for choosing experts, not for weighting them (bias-balanced routing).
        groups: number of equal runs of consecutive experts, of which a token uses ``groups_used``: those with the
            largest sum of their two highest scores (DeepSeek-AI: DeepSeek-V3 technical report, 2024).
        normalize: the weights of a token sum to ``scale``; otherwise they are its scores times ``scale``.
        used_token: [S], 0 for padding.

    Returns:
        Routes whose ``l_aux`` is the load-balancing loss of top-k gates, computed from scores that sum to 1.
    """
    if score not in SCORES:
        raise ValueError(f"score={score!r}: expected one of {', '.join(SCORES)}")
    count = logits.shape[1]
    logits = logits.float()
    scores = torch.softmax(logits, 1) if score == "softmax" else torch.sigmoid(logits)
    judged = scores.detach() if bias is None else scores.detach() + bias
    if groups > 1:
        judged = _in_best_groups(judged, groups, groups_used or groups)
    experts = judged.topk(k, dim=1).indices
    kept = torch.ones_like(experts, dtype=torch.bool)
    if used_token is not None:
        kept = (used_token.reshape(-1, 1) != 0).expand_as(experts)
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    counts = torch.bincount(experts[kept], minlength=count)
    shares = scores if score == "softmax" else scores / scores.sum(1, keepdim=True)
    l_aux = (shares.mean(0) * (counts.to(scores.dtype) / max(len(logits), 1))).sum() * count / k
    return Routes(experts, (weights * scale).masked_fill(~kept, 0.0), kept, counts, l_aux, None)


def _in_best_groups(scores: Tensor, groups: int, used: int) -> Tensor:
    if scores.shape[1] % groups or not 1 <= used <= groups:
        raise ValueError(
            f"{scores.shape[1]} experts cannot be divided into {groups} groups, of which a token uses {used}"
        )
    by_group = scores.unflatten(1, (groups, -1))
    best = by_group.topk(min(2, by_group.shape[2]), dim=2).values.sum(2).topk(used, dim=1).indices
    allowed = torch.zeros_like(by_group[:, :, 0], dtype=torch.bool).scatter(1, best, True)
    return by_group.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)


class BalancedGate(nn.Module):
    """A gate for ``MOELayer`` that balances experts without a loss: a bias on each expert's score rises by ``rate``
    when it got fewer tokens than the mean, and falls when it got more.

    L. Wang et al.: Auxiliary-loss-free load balancing strategy for mixture-of-experts, 2024, as in DeepSeek-V3.
    ``rebalance`` updates the bias; call it after each step. Other arguments as in ``scored_routes``.
    """

    bias: Tensor
    seen: Tensor

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        *,
        score: str = "sigmoid",
        rate: float = 1e-3,
        groups: int = 1,
        groups_used: int | None = None,
        normalize: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim))
        nn.init.normal_(self.weight, std=model_dim**-0.5)
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("seen", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.k = k
        self.score, self.rate, self.scale, self.normalize = score, rate, scale, normalize
        self.groups, self.groups_used = groups, groups_used
        self.z_loss: Tensor | None = None

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> Routes:
        """Route tokens [S, model_dim]; sets ``z_loss`` to the z-loss of their logits."""
        with torch.autocast(input.device.type, enabled=False):
            logits = F.linear(input.float(), self.weight.float())
        self.z_loss = router_z_loss(logits)
        routes = scored_routes(
            logits,
            self.k,
            score=self.score,
            bias=self.bias.float(),
            groups=self.groups,
            groups_used=self.groups_used,
            normalize=self.normalize,
            scale=self.scale,
            used_token=used_token,
        )
        if self.training:
            self.seen += routes.exp_counts
        return routes

    def routes(self, input: Tensor, used_token: Tensor | None = None) -> Routes:
        routes: Routes = self(input, used_token)
        return routes

    def _set_ep_group(self, ep_group: object) -> None:
        """Ignore the group: no token is dropped, so no capacity is agreed on."""

    @torch.no_grad()
    def rebalance(self) -> None:
        """Update the bias by the token counts of all ranks with the same gate since the last call. Collective."""
        mesh = get_mesh()
        if isinstance(mesh, ProcessMesh):
            mesh.communicator("dp", "sp").all_reduce(self.seen).wait()
        seen = self.seen.to(self.bias.dtype)
        self.bias += self.rate * torch.sign(seen.mean() - seen)
        self.seen.zero_()
