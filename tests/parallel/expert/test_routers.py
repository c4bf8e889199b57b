"""Scores by sigmoid, groups of experts, balance by a bias, z-loss: against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.parallel.expert.layer import Experts
from deepspeed.parallel.expert.routers import BalancedGate, router_z_loss, scored_routes
from deepspeed.parallel.expert.sharded_moe import MOELayer

TOKENS, EXPERTS, HIDDEN = 10, 8, 6


def logits_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_z_loss() -> None:
    logits = logits_of()
    wanted = sum(row.exp().sum().log() ** 2 for row in logits) / TOKENS
    torch.testing.assert_close(router_z_loss(logits), wanted)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_the_scores_and_the_bias_only_chooses(score: str, normalize: bool) -> None:
    logits, bias = logits_of(1), torch.linspace(-0.5, 0.5, EXPERTS)
    routes = scored_routes(logits, 3, score=score, bias=bias, normalize=normalize, scale=2.5)
    for token in range(TOKENS):
        scores = torch.softmax(logits[token], 0) if score == "softmax" else torch.sigmoid(logits[token])
        chosen = (scores + bias).topk(3).indices
        weights = scores[chosen] / (scores[chosen].sum() if normalize else 1.0) * 2.5
        assert torch.equal(routes.experts[token], chosen)
        torch.testing.assert_close(routes.weights[token], weights)
    assert routes.exp_counts.sum() == 3 * TOKENS and routes.kept.all()
    routes.weights.square().sum().backward()
    assert logits.grad is not None and logits.grad.any()


def test_a_token_uses_few_groups() -> None:
    logits = logits_of(2)
    routes = scored_routes(logits, 3, score="sigmoid", groups=4, groups_used=2)
    for token in range(TOKENS):
        scores = torch.sigmoid(logits[token]).view(4, 2)
        best = set(scores.sum(1).topk(2).indices.tolist())
        allowed = [e for e in range(EXPERTS) if e // 2 in best]
        wanted = sorted(allowed, key=lambda e: -float(scores.view(-1)[e].detach()))[:3]
        assert routes.experts[token].tolist() == wanted
    with pytest.raises(ValueError, match="8 experts cannot be divided into 3 groups"):
        scored_routes(logits, 3, groups=3)


def test_the_bias_balances() -> None:
    """With weights that prefer one expert, steps of the bias bring the largest share down."""
    torch.manual_seed(0)
    gate = BalancedGate(HIDDEN, EXPERTS, k=2, rate=0.02)
    tokens = torch.randn(200, HIDDEN) + 1.0
    before = gate(tokens).exp_counts.max()
    gate.seen.zero_()
    for _ in range(100):
        gate(tokens)
        gate.rebalance()
    after = gate.eval()(tokens).exp_counts
    assert after.max() < 0.6 * before and not gate.seen.any()
    assert after.max() < 1.6 * after.float().mean()


def test_in_a_layer() -> None:
    torch.manual_seed(0)
    gate, experts = BalancedGate(HIDDEN, 4, k=2), Experts(nn.Linear(HIDDEN, HIDDEN), 4, "ep_size_1")
    for param in experts.parameters():
        nn.init.normal_(param)
    layer = MOELayer(gate, experts, "ep_size_1", 1, 4)
    tokens = torch.randn(2, 5, HIDDEN)
    output = layer(tokens, None)
    routes = gate(tokens.view(-1, HIDDEN))
    for token, row in enumerate(tokens.view(-1, HIDDEN)):
        wanted = sum(
            w * experts.deepspeed_experts[int(e)](row)
            for e, w in zip(routes.experts[token], routes.weights[token], strict=True)
        )
        torch.testing.assert_close(output.view(-1, HIDDEN)[token], wanted, rtol=1e-5, atol=1e-6)
