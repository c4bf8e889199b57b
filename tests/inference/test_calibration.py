"""Integers chosen by a text: GPTQ against its definition, and what the methods do to a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.inference.kernels import IntegerLinear
from deepspeed.inference.quantized.calibration import METHODS, _gptq, _largest, quantize_calibrated


def by_definition(weight: Tensor, second: Tensor, scale: Tensor, most: int) -> Tensor:
    """Optimal brain quantization in a fixed order: round a column, have the others make up for it by the inverse of
    what is left of the second moments, and leave the column out of it."""
    order = second.diagonal().argsort(descending=True).tolist()
    left, result = weight.clone(), torch.empty_like(weight)
    for position, column in enumerate(order):
        rest = order[position:]
        inverse = torch.linalg.inv(second[rest][:, rest])
        result[:, column] = (left[:, column] / scale[:, column]).round().clamp(-most, most)
        error = left[:, column] - result[:, column] * scale[:, column]
        left[:, rest] -= torch.outer(error / inverse[0, 0], inverse[0])
    return result


def test_gptq_is_what_its_definition_says() -> None:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(500, 256, generator=numbers) * torch.linspace(0.2, 3, 256)
    weight = torch.randn(7, 256, generator=numbers)
    second = inputs.T @ inputs
    scales = _largest(weight, 4, 128)
    found = _gptq(weight, second.clone(), scales, 4, 128)
    damped = second.double()
    damped.diagonal().add_(0.01 * float(damped.diagonal().mean()) + 1e-12)
    wanted = by_definition(weight.double(), damped, scales.repeat_interleave(128, 1).double(), 7)
    assert (found != wanted).float().mean() < 0.01  # a half rounds either way


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.up(self.norm(inputs)).relu())


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 50)
        with torch.no_grad():  # some channels are much larger than others, as in trained models
            for block in self.blocks:
                block.norm.weight[::7] *= 8

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batches() -> list[Any]:
    numbers = torch.Generator().manual_seed(2)
    tokens = [torch.randint(50, (4, 32), generator=numbers) for _ in range(3)]
    return [tokens[0], (tokens[1],), {"tokens": tokens[2]}]


@pytest.mark.parametrize("width", [128, 96])
def test_both_methods_are_nearer_than_rounding(width: int) -> None:
    unseen = torch.randint(50, (4, 32), generator=torch.Generator().manual_seed(3))
    errors = {}
    for method in METHODS:
        module = Model(width)
        with torch.no_grad():
            wanted = module(unseen)
            report = quantize_calibrated(module, batches(), bits=4, method=method)
            errors[method] = float((module(unseen) - wanted).norm() / wanted.norm())
        assert len(report.errors) == 6 and f"by {method}" in str(report)
        assert all(isinstance(block.down, IntegerLinear) for block in module.blocks)
        assert type(module.head) is nn.Linear and report.bytes_after < 0.2 * report.bytes_before * 128 / width
        assert module.blocks[0].up.weight.shape == (2 * width, width)
    assert errors["gptq"] < 0.8 * errors["nearest"] and errors["awq"] < 0.97 * errors["nearest"]


def test_eight_bits_and_what_is_impossible() -> None:
    module, unseen = Model(64), torch.arange(20)[None]
    with torch.no_grad():
        wanted = module(unseen)
        quantize_calibrated(module, batches(), bits=8, group_size=64)
        assert (module(unseen) - wanted).norm() < 0.01 * wanted.norm()
    for arguments, words in (
        ({"bits": 3}, "bits=3"),
        ({"bits": 4, "group_size": 64}, "group_size=64"),
        ({"method": "best"}, "method='best'"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize_calibrated(Model(64), batches(), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no batches"):
        quantize_calibrated(Model(64), [])
    with pytest.raises(ValueError, match="no blocks"):
        quantize_calibrated(nn.Linear(4, 4), [torch.zeros(1, 4)])
