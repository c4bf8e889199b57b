"""Sparse gradients (`nn.Embedding(sparse=True)`) without an engine: Adagrad against torch's, all others refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.ops.adagrad import Adagrad, DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import FusedLion


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(11, 4, sparse=sparse), nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words)).square().sum()


@pytest.mark.parametrize(
    ("sums", "make"),
    [
        ("exp_avg_sq", lambda params: DeepSpeedCPUAdagrad(params, lr=0.1)),  # the name of release 0.19
        ("sum", lambda params: Adagrad(params, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5)),
    ],
)
def test_adagrad_with_sparse_gradients_is_torchs(sums: str, make) -> None:
    ours, torchs = Bag(sparse=True), Bag(sparse=True)
    optimizer = make(ours.parameters())
    group = optimizer.param_groups[0]
    oracle = torch.optim.Adagrad(
        torchs.parameters(),
        lr=0.1,
        lr_decay=group["lr_decay"],
        initial_accumulator_value=group["initial_accumulator_value"],
    )
    for step in range(5):
        words = torch.tensor([[1, 1, step], [3, 1, 10]])  # a word that occurs twice, words that never do
        for model, stepped in ((ours, optimizer), (torchs, oracle)):
            stepped.zero_grad()
            model(words).backward()
            stepped.step()
        assert ours.words.weight.grad.is_sparse
    torch.testing.assert_close(dict(ours.named_parameters()), dict(torchs.named_parameters()))
    assert torch.equal(ours.words.weight[9], Bag(sparse=True).words.weight[9])
    torch.testing.assert_close(
        optimizer.state[ours.words.weight][sums], oracle.state[torchs.words.weight]["sum"]
    )
    assert optimizer.state[ours.words.weight]["step"] == 5


def test_a_bf16_table_keeps_its_dtype() -> None:
    model = Bag(sparse=True).bfloat16()
    optimizer = DeepSpeedCPUAdagrad(model.parameters(), lr=0.1)
    before = model.words.weight.detach().clone()
    model(torch.tensor([[2, 3]])).backward()
    optimizer.step()
    changed = (model.words.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [2, 3] and model.words.weight.dtype is torch.bfloat16


def test_weight_decay_does_not_go_with_sparse_gradients() -> None:
    model = Bag(sparse=True)
    optimizer = DeepSpeedCPUAdagrad(model.parameters(), weight_decay=0.1)
    model(torch.tensor([[2, 3]])).backward()
    with pytest.raises(RuntimeError, match="weight_decay=0.1 cannot be combined with sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam, FusedLion])
def test_other_methods_refuse_sparse_gradients(kind) -> None:
    model = Bag(sparse=True)
    optimizer = kind(model.parameters())
    model(torch.tensor([[2, 3]])).backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
