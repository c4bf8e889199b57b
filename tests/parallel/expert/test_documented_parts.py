"""Router, experts and orders of tokens that scripts use by themselves, against loops over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.parallel.expert.ep_count import count_tokens_per_expert
from deepspeed.parallel.expert.ep_experts import GroupedExperts
from deepspeed.parallel.expert.ep_kernels import generate_permute_indices, indices_padding_wrapper
from deepspeed.parallel.expert.ep_router import TokenChoiceTopKRouter


def router(**more: object) -> TokenChoiceTopKRouter:
    settings = {
        "dim": 16,
        "num_experts": 8,
        "num_expert_groups": None,
        "num_limited_groups": None,
        "top_k": 2,
        "score_func": "softmax",
        "route_norm": True,
        "route_scale": 1.5,
        "gate_bias": True,
    }
    torch.manual_seed(0)
    return TokenChoiceTopKRouter(**settings | more)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_chooses_by_biased_scores_and_weighs_by_plain_ones(score: str) -> None:
    made = router(score_func=score)
    made.e_score_correction_bias = torch.linspace(-1, 1, 8)
    tokens, extra = torch.randn(12, 16), torch.linspace(2, 0, 8)
    weights, experts, counts = made(tokens, extra)
    logits = made.gate(tokens)
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    for token in range(12):
        expected = (scores[token] + extra + made.e_score_correction_bias).topk(2).indices
        assert set(experts[token].tolist()) == set(expected.tolist())
        chosen = scores[token, experts[token]]
        torch.testing.assert_close(weights[token], 1.5 * chosen / chosen.sum())
    assert counts.dtype == torch.int32
    assert counts.tolist() == [int((experts == expert).sum()) for expert in range(8)]
    assert torch.equal(counts, count_tokens_per_expert(experts, 8))


@pytest.mark.parametrize("kind", ["max", "top2_sum"])
def test_router_leaves_tokens_in_their_best_groups(kind: str) -> None:
    made = router(num_expert_groups=4, num_limited_groups=2, group_score_func=kind, route_norm=False)
    tokens = torch.randn(40, 16)
    _, experts, _ = made(tokens)
    groups = made.gate(tokens).softmax(1).view(40, 4, 2)
    best = (groups.amax(2) if kind == "max" else groups.sum(2)).topk(2).indices
    for token in range(40):
        assert set((experts[token] // 2).tolist()) <= set(best[token].tolist())


def test_router_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="num_limited_groups"):
        router(num_expert_groups=4)
    with pytest.raises(ValueError, match="group_score_func='mean'"):
        router(group_score_func="mean")


def test_experts_compute_their_runs() -> None:
    torch.manual_seed(1)
    experts = GroupedExperts(8, 12, 3)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.3)
    tokens = torch.randn(9, 8, requires_grad=True)
    made = experts(tokens, torch.tensor([2, 0, 5]))
    of = [0, 0, 2, 2, 2, 2, 2]
    expected = torch.stack(
        [
            experts.w2[e] @ (F.silu(experts.w1[e] @ token) * (experts.w3[e] @ token))
            for e, token in zip(of, tokens[:7], strict=True)
        ]
    )
    torch.testing.assert_close(made[:7], expected)
    assert not made[7:].any()
    made.sum().backward()
    assert experts.w1.grad is not None
    assert experts.w1.grad[[0, 2]].any() and not experts.w1.grad[1].any()
    assert experts(tokens.detach().bfloat16(), torch.tensor([2, 0, 5])).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="does not fit 3 experts and 9 tokens"):
        experts(tokens, torch.tensor([5, 5, 5]))


def test_tokens_of_ranks_come_to_their_experts() -> None:
    """Two ranks sent tokens to three experts each; places are multiples of 4."""
    counts = torch.tensor([2, 0, 5, 3, 1, 0])
    indices, sizes, ends = generate_permute_indices(counts, 3, 2, 24, 4, use_cpu=True)
    assert (sizes.tolist(), ends.tolist()) == ([8, 4, 8], [8, 12, 20])
    first, second, third = [0, 1, 7, 8, 9], [10], [2, 3, 4, 5, 6]
    assert indices.tolist() == [*first, *[-1] * 3, *second, *[-1] * 3, *third, *[-1] * 3, *[-1] * 4]


def test_a_function_of_sorted_tokens_gets_them_sorted() -> None:
    experts = GroupedExperts(8, 12, 2)
    torch.manual_seed(2)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.3)

    def computed(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        assert not any(each % 8 for each in counts.tolist())
        return experts(x, counts)

    tokens, counts = torch.randn(7, 8), torch.tensor([1, 2, 3, 1])
    made = indices_padding_wrapper(computed)(experts.w1, experts.w2, experts.w3, tokens, counts)
    order = torch.tensor([0, 3, 4, 5, 1, 2, 6])
    expected = torch.empty_like(made).index_copy(0, order, experts(tokens[order], torch.tensor([4, 3])))
    torch.testing.assert_close(made, expected)


def test_a_section_by_its_documented_names() -> None:
    from deepspeed.compat.module_inject import auto_ep_config as documented

    config = documented.parse_autoep_config({"enabled": True, "autoep_size": 3, "expert_w3": None})
    assert isinstance(config, documented.AutoEPConfig) and config.expert_w3 is None
    assert documented.parse_autoep_config({}).expert_w3 is documented._UNSET
    documented.validate_autoep_config(config, 6, 2, 1, 1)
    with pytest.raises(ValueError, match="must divide the stage size"):
        documented.validate_autoep_config(config, 8, 1, 1, 1)
    with pytest.raises(ValueError, match="autotp_size=2"):
        documented.validate_autoep_config(config, 6, 1, 2, 1)
    unnamed = documented.parse_autoep_config({"enabled": True, "expert_w1": ""})
    with pytest.raises(ValueError, match="expert_w1 is empty"):
        documented.validate_autoep_config(unnamed, 8, 1, 1, 1)
    documented.validate_autoep_config(documented.parse_autoep_config({"autoep_size": 3}), 8, 1, 1, 1)
