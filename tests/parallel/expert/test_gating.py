"""The documented outputs of the gating functions, against a loop over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.parallel.expert.sharded_moe import TopKGate, top1gating, top2gating, topkgating

TOKENS, EXPERTS = 12, 4


def logits_of(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def by_loop(
    logits: Tensor,
    choices: list[list[int]],
    priority: list[tuple[int, int]],
    capacity: int,
    *,
    normalize: bool,
    in_order_of_tokens: bool = True,
) -> Tensor:
    """combine_weights: ``choices[token]`` are its experts; (token, choice) pairs find room in the order of
    ``priority``, which is also the order of their places unless that is ``in_order_of_tokens``."""
    gates = torch.softmax(logits, 1)
    taken: dict[int, list[tuple[int, int]]] = {e: [] for e in range(EXPERTS)}
    for token, choice in priority:
        expert = choices[token][choice]
        if len(taken[expert]) < capacity:
            taken[expert].append((token, choice))
    result = torch.zeros(len(logits), EXPERTS, capacity, dtype=gates.dtype)
    for expert, members in taken.items():
        for position, (token, _) in enumerate(sorted(members) if in_order_of_tokens else members):
            found = [e for e in choices[token] if any(t == token for t, _ in taken[e])]
            total = sum(gates[token, e] for e in found) if normalize else 1.0
            result[token, expert, position] = gates[token, expert] / total
    return result


def check(found: Any, logits: Tensor, expected: Tensor, counts: list[int], l_aux: Tensor) -> None:
    loss, combine, mask, exp_counts = found
    torch.testing.assert_close(combine, expected, rtol=1e-6, atol=1e-7)
    assert mask.dtype == torch.bool and torch.equal(mask, expected != 0)
    assert exp_counts.tolist() == counts
    torch.testing.assert_close(loss, l_aux)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    (own,) = torch.autograd.grad((combine * direction).sum() + loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * direction).sum() + l_aux, logits)
    torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)


def balance(logits: Tensor, chosen: list[list[int]], factor: float) -> Tensor:
    """``factor`` x E x the mean over experts of (mean gate x share of choices) x E."""
    gates, total = torch.softmax(logits, 1), torch.tensor(0.0)
    for expert in range(EXPERTS):
        share = sum(expert in each for each in chosen) / len(logits)
        total = total + gates[:, expert].mean() * share
    return total * EXPERTS * factor


def counted(choices: list[list[int]]) -> list[int]:
    return [sum(each.count(e) for each in choices) for e in range(EXPERTS)]


@pytest.mark.parametrize(("factor", "least"), [(1.0, 1), (0.5, 1), (0.25, 2), (2.0, 4)])
def test_top1_takes_the_first_tokens(factor: float, least: int) -> None:
    logits = logits_of()
    choices = [[int(row.argmax())] for row in logits]
    capacity = max(math.ceil(TOKENS / EXPERTS * factor), least)
    expected = by_loop(logits, choices, [(t, 0) for t in range(TOKENS)], capacity, normalize=False)
    found = top1gating(logits, factor, least, use_rts=False)
    check(found, logits, expected, counted(choices), balance(logits, choices, 1.0))


def test_top1_without_dropping_has_room_for_the_fullest_expert() -> None:
    logits = logits_of(1)
    choices = [[int(row.argmax())] for row in logits]
    expected = by_loop(
        logits, choices, [(t, 0) for t in range(TOKENS)], max(counted(choices)), normalize=False
    )
    found = top1gating(logits, 0.1, 1, drop_tokens=False)
    check(found, logits, expected, counted(choices), balance(logits, choices, 1.0))


def test_random_token_selection_keeps_as_many_but_others() -> None:
    logits = torch.zeros(100, EXPERTS)
    logits[:, 2] = 1.0
    kept = set()
    for seed in range(3):
        torch.manual_seed(seed)
        _, combine, mask, counts = top1gating(logits, 1.0, 1, use_rts=True)
        assert mask.sum() == 25 and counts.tolist() == [0, 0, 100, 0]
        assert (mask.sum(0) <= 1).all()  # one token in each place
        kept.add(tuple(mask.any(2).any(1).nonzero().flatten().tolist()))
        assert torch.equal(combine != 0, mask)
    assert len(kept) == 3


def test_unused_tokens_go_to_no_expert() -> None:
    logits = logits_of(2)
    used = torch.tensor([1, 0] * (TOKENS // 2))
    choices = [[int(row.argmax())] if u else [] for row, u in zip(logits, used, strict=True)]
    priority = [(t, 0) for t in range(TOKENS) if used[t]]
    expected = by_loop(logits, choices, priority, 3, normalize=False)
    found = top1gating(logits, 1.0, 1, used_token=used, use_rts=False)
    check(found, logits, expected, counted(choices), balance(logits, choices, 1.0))


def test_rsample_follows_the_noise_but_weighs_by_the_softmax() -> None:
    logits = torch.zeros(4000, EXPERTS)
    logits[:, 0] = math.log(3.0)
    _, combine, _, counts = top1gating(logits, 1.0, 1, noisy_gate_policy="RSample", drop_tokens=False)
    shares = counts / counts.sum()  # argmax of logits with Gumbel noise is a sample of the softmax
    torch.testing.assert_close(shares, torch.tensor([0.5, 1 / 6, 1 / 6, 1 / 6]), rtol=0, atol=0.03)
    weights = combine.sum((1, 2))
    assert set(weights.mul(6).round().int().tolist()) == {1, 3}


@pytest.mark.parametrize(("factor", "drop"), [(1.0, True), (0.4, True), (1.0, False)])
def test_top2(factor: float, drop: bool) -> None:
    logits = logits_of(3)
    choices = [row.topk(2).indices.tolist() for row in logits]
    capacity = max(math.ceil(TOKENS / EXPERTS * factor * 2), 1) if drop else max(counted(choices))
    priority = [(t, choice) for choice in (0, 1) for t in range(TOKENS)]
    expected = by_loop(logits, choices, priority, capacity, normalize=True, in_order_of_tokens=False)
    found = top2gating(logits, factor, 1, drop_tokens=drop, top2_2nd_expert_sampling=False)
    check(found, logits, expected, counted(choices), balance(logits, [c[:1] for c in choices], 1.0))


def test_the_second_expert_is_sampled_but_never_the_first() -> None:
    logits = logits_of(4)
    first = logits.argmax(1)
    seconds = set()
    for seed in range(5):
        torch.manual_seed(seed)
        _, _, mask, counts = top2gating(logits, 1.0, 1, drop_tokens=False)
        chosen = mask.any(2)
        assert counts.sum() == 2 * TOKENS and (chosen.sum(1) == 2).all()
        assert chosen[torch.arange(TOKENS), first].all()
        seconds.add(tuple(chosen.flatten().tolist()))
    assert len(seconds) > 1


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(
    ("k", "factor", "drop"), [(1, 0.5, True), (3, 0.6, True), (3, 1.0, False), (4, 0.5, True)]
)
def test_topk(k: int, factor: float, drop: bool, policy: str) -> None:
    logits = logits_of(5)
    gates = torch.softmax(logits, 1).detach()
    choices = [row.topk(k).indices.tolist() for row in logits]
    capacity = max(math.ceil(TOKENS / EXPERTS * factor * k), 1) if drop else max(counted(choices))
    pairs = [(t, c) for t in range(TOKENS) for c in range(k)]
    if policy == "probs":
        pairs.sort(key=lambda pair: -float(gates[pair[0], choices[pair[0]][pair[1]]]))
    expected = by_loop(logits, choices, pairs, capacity, normalize=True)
    found = topkgating(logits, k, factor, 1, drop_tokens=drop, drop_policy=policy)
    check(found, logits, expected, counted(choices), balance(logits, choices, 1 / k))


def test_lists_of_choices_say_the_same() -> None:
    logits = logits_of(6)
    _, dense, *_ = topkgating(logits, 2, 0.5, 1)
    _, capacity, count, experts, places, weights, _ = topkgating(logits, 2, 0.5, 1, sparse_routes=True)
    made = torch.zeros(TOKENS, count, capacity)
    for each, place, weight in zip(experts, places, weights, strict=True):
        for token in range(TOKENS):
            if weight[token] != 0:
                made[token, each[token], place[token]] = weight[token]
    assert torch.equal(made, dense)


def test_a_gate_distinguishes_training_and_evaluation() -> None:
    gate = TopKGate(8, EXPERTS, k=1, capacity_factor=1.0, eval_capacity_factor=2.0, min_capacity=1)
    tokens = torch.randn(16, 8)
    assert gate(tokens)[1].shape == (16, EXPERTS, 4)
    assert gate.eval()(tokens)[1].shape == (16, EXPERTS, 8)


def test_jitter_changes_training_only() -> None:
    gate = TopKGate(8, EXPERTS, noisy_gate_policy="Jitter", drop_tokens=False)
    tokens = torch.randn(16, 8)
    assert not torch.equal(gate(tokens)[0], gate(tokens)[0])
    gate.eval()
    assert torch.equal(gate(tokens)[0], gate(tokens)[0])


def test_a_gate_computes_in_fp32_whatever_the_weights() -> None:
    gate = TopKGate(8, EXPERTS, drop_tokens=False).bfloat16()
    tokens = torch.randn(16, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss, combine, _, _ = gate(tokens)
    expected = torch.softmax(tokens.float() @ gate.wg.weight.float().T, 1).max(1).values
    assert loss.dtype == combine.dtype == torch.float32
    torch.testing.assert_close(combine.sum((1, 2)), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 5}, "k=5.*num_experts=4"),
        ({"noisy_gate_policy": "Noise"}, "noisy_gate_policy='Noise'.*'RSample'"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKGate(8, EXPERTS, **arguments)


def test_evaluation_draws_nothing() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(6, 8)
    gates = [
        TopKGate(8, 4, k=2, eval_capacity_factor=2.0, min_capacity=2, top2_2nd_expert_sampling=drawn)
        for drawn in (True, False)
    ]
    gates[1].load_state_dict(gates[0].state_dict())
    for gate in gates:
        gate.eval()
    masks = [gates[i](tokens)[2] for i in (0, 0, 1)]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    gates[0].train()
    found = {tuple(gates[0](tokens)[2].nonzero().flatten().tolist()) for _ in range(8)}
    assert len(found) > 1


def test_helpers_for_gates_of_scripts() -> None:
    """A gate as public scripts write theirs gives what ours does."""
    from deepspeed.moe.sharded_moe import _capacity, _one_hot_to_float, _top_idx, einsum, gumbel_rsample

    logits = torch.randn(20, 4)
    gates = logits.softmax(1)
    limit = _capacity(gates, torch.tensor(0.7), torch.tensor(2))
    mask = torch.nn.functional.one_hot(gates.argmax(1), 4)
    places = torch.cumsum(mask, 0) - 1
    mask = mask * (places < limit)
    combine = einsum("se,sc->sec", gates * mask, _one_hot_to_float((places * mask).sum(1), limit))
    torch.testing.assert_close(combine, top1gating(logits, 0.7, 2, use_rts=False)[1])
    assert torch.equal(_top_idx(gates, limit), gates.argsort(0, descending=True)[: int(limit)])
    assert gumbel_rsample((20_000,), device="cpu").mean().item() == pytest.approx(0.5772, abs=0.05)
