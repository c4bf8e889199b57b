"""The layer on one rank, against the dense products of the documented tensors; dispatch by sorting."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from deepspeed.parallel.expert.layer import Experts, MoE
from deepspeed.parallel.expert.sharded_moe import TopKGate
from deepspeed.parallel.expert.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)

HIDDEN, EXPERTS = 8, 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


def layer_of(**settings: Any) -> MoE:
    torch.manual_seed(0)
    layer = MoE(HIDDEN, mlp(), **{"num_experts": EXPERTS, "use_rts": False, **settings})
    with torch.no_grad():  # copies of one expert would hide mistakes
        for param in layer.deepspeed_moe.experts.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return layer


def densely(layer: MoE, tokens: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The documented formula: one-hot products with capacity."""
    flat = tokens.reshape(-1, HIDDEN)
    l_aux, combine, mask, counts = layer.deepspeed_moe.gate(flat, used)
    inputs = torch.einsum("sec,sm->ecm", mask.type_as(flat), flat)
    outputs = layer.deepspeed_moe.experts(inputs[None])[0]
    return torch.einsum("sec,ecm->sm", combine.type_as(flat), outputs).view(tokens.shape), l_aux, counts


@pytest.mark.parametrize(
    "settings",
    [
        {"k": 1}, {"k": 1, "drop_tokens": False}, {"k": 2, "top2_2nd_expert_sampling": False},
        {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}, {"k": 3, "capacity_factor": 0.5},
        {"k": 4, "drop_tokens": False}, {"num_experts": 1},
    ],
    ids=str,
)  # fmt: skip
def test_equals_the_documented_products(settings: dict[str, Any]) -> None:
    layer = layer_of(min_capacity=1, **settings)
    twin = copy.deepcopy(layer)
    tokens = torch.randn(3, 10, HIDDEN)
    mine, theirs = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    output, l_aux, counts = layer(mine)
    wanted, wanted_aux, wanted_counts = densely(twin, theirs)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(l_aux, wanted_aux) and torch.equal(counts, wanted_counts)
    direction = torch.randn(output.shape)
    ((output * direction).sum() + l_aux).backward()
    ((wanted * direction).sum() + wanted_aux).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    for (name, own), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)


class OwnGate(TopKGate):
    """Routes by the angle between token and expert, and adds to the loss, as gates of public scripts do."""

    def forward(self, input: Tensor, used_token: Tensor | None = None, use_tutel: bool = False) -> Any:  # type: ignore[override]
        own = functional.normalize(input.float(), dim=-1)
        l_aux, *rest = super().forward(own, used_token, use_tutel)
        return (0.1 * l_aux + functional.linear(own, self.wg.weight).square().mean(), *rest)


class Foreign(nn.Module):
    """Not derived from ours: each token goes to two slots of expert 1, odd ones also to expert 3."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def _set_ep_group(self, ep_group: Any) -> None:
        pass

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> Any:
        combine = torch.zeros(len(input), EXPERTS, 2 * len(input))
        rows = torch.arange(len(input))
        combine[rows, 1, 2 * rows], combine[rows, 1, 2 * rows + 1] = 1.0, 2.0
        combine[rows[1::2], 3, rows[1::2]] = 4.0
        combine = combine * self.scale
        return self.scale * 2, combine, combine.bool(), torch.tensor([0, len(input), 0, len(input) // 2])


@pytest.mark.parametrize("kind", ["derived", "foreign", "patched", "hooked"])
def test_a_gate_is_what_its_forward_says(kind: str) -> None:
    layer, heard = layer_of(k=2, top2_2nd_expert_sampling=False), []
    if kind in ("derived", "foreign"):
        gate = OwnGate(HIDDEN, EXPERTS, 2, top2_2nd_expert_sampling=False) if kind == "derived" else Foreign()
        layer.deepspeed_moe.gate = gate
    elif kind == "patched":
        gate = layer.deepspeed_moe.gate
        gate.forward = types.MethodType(lambda self, x, used: TopKGate.forward(self, -x, used), gate)
    twin = copy.deepcopy(layer)
    if kind == "hooked":
        layer.deepspeed_moe.gate.register_forward_hook(lambda *given: heard.append(given[2][1].shape))
    tokens = torch.randn(7, HIDDEN)
    mine, theirs = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    output, l_aux, counts = layer(mine)
    wanted, wanted_aux, wanted_counts = densely(twin, theirs)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(l_aux, wanted_aux) and torch.equal(counts, wanted_counts)
    direction = torch.randn(output.shape)
    ((output * direction).sum() + l_aux).backward()
    ((wanted * direction).sum() + wanted_aux).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    for (name, own), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        if own.grad is not None or other.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)
    assert len(heard) == (kind == "hooked")


def test_no_token_is_dropped_or_padded_without_dropping() -> None:
    """Even if all tokens go to one expert: rows that the experts compute = tokens x k."""
    layer = layer_of(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()
    rows, experts = [], layer.deepspeed_moe.experts
    assert isinstance(experts, Experts)
    for expert in experts.deepspeed_experts:
        expert.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    layer(torch.randn(50, HIDDEN))
    assert sum(rows) == 100 and sorted(rows) == [0, 0, 50, 50]


def test_products_are_those_of_the_tokens_that_were_chosen() -> None:
    """Counted FLOPs are only those of the experts on each token's choices, and of the gate on each token."""
    layer = layer_of(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    tokens = torch.randn(50, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(tokens)[0].sum().backward()
    forward = 50 * 2 * (2 * 2 * HIDDEN * 2 * HIDDEN) + 50 * 2 * HIDDEN * EXPERTS
    assert counter.get_total_flops() == 3 * forward


def test_an_expert_without_tokens_has_zeros_as_gradients() -> None:
    layer = layer_of(k=1, drop_tokens=False)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()
    output, l_aux, _ = layer(torch.randn(6, HIDDEN))
    (output.sum() + l_aux).backward()
    for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        for param in expert.parameters():
            assert param.grad is not None and bool(param.grad.any()) == (number == 0)


def test_no_token_at_all() -> None:
    layer = layer_of(k=2, drop_tokens=False)
    tokens = torch.zeros(0, HIDDEN, requires_grad=True)
    layer(tokens)[0].sum().backward()
    assert all(not p.grad.any() for p in layer.deepspeed_moe.experts.parameters())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_unused_tokens_get_nothing(k: int) -> None:
    layer = layer_of(k=k, drop_tokens=False)
    used = torch.tensor([1, 1, 0, 1, 0, 1])
    output, _, counts = layer(torch.randn(2, 3, HIDDEN), used)
    assert torch.equal(output.view(-1, HIDDEN).any(1), used.bool()) and counts.sum() == 4 * k


def test_a_dropped_token_does_not_spread_what_is_not_finite() -> None:
    layer = layer_of(k=1, min_capacity=1, capacity_factor=0.1)
    tokens = torch.randn(6, HIDDEN)
    tokens[0] = float("nan")
    output = layer(tokens)[0]
    assert output[1:].isfinite().all()


def test_residual_experts() -> None:
    layer = layer_of(use_residual=True, drop_tokens=False)
    tokens = torch.randn(5, HIDDEN)
    output, _, _ = layer(tokens)
    shares = torch.softmax(layer.coefficient(tokens), -1)
    wanted = densely(layer, tokens)[0] * shares[:, :1] + layer.mlp(tokens) * shares[:, 1:]
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)
    assert not is_moe_param(layer.mlp[0].weight)


def test_experts_compute_the_documented_shape() -> None:
    experts = Experts(nn.Linear(HIDDEN, HIDDEN), 2, "ep_size_1")
    inputs = torch.randn(3, 2, 5, HIDDEN)
    wanted = torch.stack([experts.deepspeed_experts[i](inputs[:, i]) for i in range(2)], 1)
    torch.testing.assert_close(experts(inputs), wanted)


def test_experts_keep_their_numbers() -> None:
    experts = Experts(nn.Linear(HIDDEN, HIDDEN), 2, "ep_size_2")
    first, second = experts.deepspeed_experts
    experts.set_rank(1, 2)
    assert [name for name, _ in experts.named_children()] == ["deepspeed_experts"]
    assert list(dict(experts.deepspeed_experts.named_children())) == ["2", "3"]
    assert experts.deepspeed_experts[0] is first and experts.deepspeed_experts[-1] is second


def test_bf16() -> None:
    layer = layer_of(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    half = copy.deepcopy(layer).bfloat16()
    tokens = torch.randn(20, HIDDEN).bfloat16()
    output, l_aux, _ = half(tokens)
    assert output.dtype == torch.bfloat16 and l_aux.dtype == torch.float32
    torch.testing.assert_close(output.float(), layer(tokens.float())[0], rtol=0.05, atol=0.05)


def test_an_unknown_group_of_ranks_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"2 ranks that share.*deepspeed.initialize"):
        MoE(HIDDEN, mlp(), num_experts=4, ep_size=2)(torch.randn(2, HIDDEN))
    with pytest.raises(AssertionError, match="num_experts=4 must be a multiple of ep_size=3"):
        MoE(HIDDEN, mlp(), num_experts=4, ep_size=3)


def test_a_list_of_one_number_of_experts() -> None:
    for number in ([4], np.int64(4)):
        assert MoE(HIDDEN, mlp(), num_experts=number).num_experts == 4
    with pytest.raises(ValueError, match=r"\[2, 4\].*one MoE layer per number"):
        MoE(HIDDEN, mlp(), num_experts=[2, 4])


# --- Parameters and groups -------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moes = nn.ModuleList([MoE(HIDDEN, mlp(), 2), MoE(HIDDEN, mlp(), 4, use_residual=True)])


def test_which_parameters_are_those_of_experts() -> None:
    model = Model()
    assert has_moe_layers(model) == (True, 4) and has_moe_layers(model.first) == (False, 0)
    spread = {name for name, p in model.named_parameters() if is_moe_param(p)}
    assert spread == {name for name, _ in model.named_parameters() if "deepspeed_experts" in name}
    shared, experts = split_params_into_shared_and_expert_params(list(model.parameters()))
    assert len(experts) == len(spread) and len(shared) + len(experts) == len(list(model.parameters()))


def test_optimizer_groups() -> None:
    model = Model()
    given = {"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}
    dense, experts = split_params_into_different_moe_groups_for_optimizer(given)
    assert experts["name"] == "ep_size_1" and experts["weight_decay"] == dense["weight_decay"] == 0.1
    assert dense["name"] == "all" and len(given["params"]) == len(dense["params"]) + len(experts["params"])
    limited = split_params_into_different_moe_groups_for_optimizer((given,), max_group_size=300)
    sizes = [sum(p.numel() for p in group["params"]) for group in limited[1:]]
    assert max(sizes) <= 300 and [p for g in limited[1:] for p in g["params"]] == experts["params"]
    assert len(configure_moe_param_groups(list(model.parameters()))) == 2
    assert configure_moe_param_groups(list(model.first.parameters())) == list(model.first.parameters())
    torch.optim.AdamW(configure_moe_param_groups([given]))
