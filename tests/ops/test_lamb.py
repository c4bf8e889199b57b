from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.update import UpdateContext
from tests.ops.cases import gradients, parameters, same_bits, train


@pytest.mark.parametrize("path", ["native", "torch"])
def test_fragments_give_what_whole_tensors_give(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    whole = parameters(shapes=[(20011,), (300,)])
    train(FusedLamb(whole, lr=1e-2, weight_decay=0.1), whole)

    start = parameters(shapes=[(20011,), (300,)])
    pieces = [piece.clone() for p in start for piece in p.detach().split(4099)]
    owner = [i for i, p in enumerate(start) for _ in p.detach().split(4099)]

    def segment_sum(fragments: list[Tensor], sums: Tensor) -> Tensor:
        assert [f.data_ptr() for f in fragments] == [p.data_ptr() for p in pieces]
        assert sums.shape == (len(pieces), 2) and sums.dtype is torch.float64
        total = torch.zeros(len(start), 2, dtype=torch.float64).index_add_(0, torch.tensor(owner), sums)
        return total[owner]

    optimizer = FusedLamb(pieces, lr=1e-2, weight_decay=0.1)
    context = UpdateContext(segment_sum=segment_sum)
    for step in range(4):
        grads = [piece for g in gradients(start, step) for piece in g.split(4099)]
        optimizer.multi_tensor_step(optimizer.param_groups[0], pieces, grads, context=context)
    assert same_bits(torch.cat(pieces), torch.cat([p.detach() for p in whole]))


def test_ranks_without_fragments_take_part() -> None:
    calls = []
    optimizer = FusedLamb([torch.zeros(3)])
    context = UpdateContext(segment_sum=lambda fragments, sums: calls.append((fragments, sums.shape)) or sums)
    none = SimpleNamespace(masters=[], grads=[], lows=[])
    optimizer.step_fragments([none], context=context)
    assert calls == [([], (0, 2))]


def test_trust_ratio_is_clamped_and_one_for_zero_tensors() -> None:
    params = [
        torch.nn.Parameter(t) for t in (torch.full((50,), 1e3), torch.full((50,), 1e-6), torch.zeros(50))
    ]
    optimizer = FusedLamb(params, lr=0.1, max_coeff=5.0, min_coeff=0.5)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [5.0, 0.5, 1.0]


@pytest.mark.parametrize("path", ["native", "torch"])
def test_eps_inside_sqrt_and_max_grad_norm(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    p.grad = torch.tensor([30.0, 40.0])
    FusedLamb([p], lr=0.1, eps=0.25, eps_inside_sqrt=True, max_grad_norm=1.0).step()
    grad = torch.tensor([0.6, 0.8], dtype=torch.float64)
    update = grad / (grad**2 + 0.25).sqrt()
    expected = torch.tensor([3.0, 4.0]).double() - 0.1 * 5.0 / update.norm() * update
    torch.testing.assert_close(p.detach().double(), expected, rtol=1e-6, atol=1e-6)
