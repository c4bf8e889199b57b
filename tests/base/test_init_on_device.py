from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.transforms.on_device import OnDevice


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.embedding = nn.Embedding(5, 4)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("frequencies", torch.arange(3) / 3.0)


@pytest.mark.parametrize("device", ["meta", "cpu", torch.device("meta")])
def test_model_is_built_on_the_device_in_the_dtype(device: str | torch.device) -> None:
    with OnDevice(dtype=torch.bfloat16, device=device):
        model = Model()
    assert {p.device.type for p in model.parameters()} == {torch.device(device).type}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.steps.dtype == torch.int64 and model.steps.device.type == torch.device(device).type
    assert model.frequencies.device.type == "cpu"  # computed values stay where they can be computed
    assert torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == "cpu"


def test_what_the_caller_says() -> None:
    with OnDevice(torch.float16):
        assert torch.zeros(2, device="cpu").device.type == "cpu"
        assert torch.ones(2, dtype=torch.float64).dtype == torch.float16
        assert torch.full((2,), 1.5).dtype == torch.float16
        assert torch.full((2,), 3).dtype == torch.int64 and torch.full((2,), 3).device.type == "meta"
        assert torch.randn(2).dtype == torch.float32


def test_off_and_nested_and_after_an_error() -> None:
    with OnDevice(torch.float16, enabled=False):
        assert torch.ones(1).dtype == torch.float32
    context = OnDevice(torch.float16, device="cpu")
    with pytest.raises(KeyError), context:
        with OnDevice(torch.float64, device="meta"), context:
            assert torch.ones(1).dtype == torch.float16 and torch.ones(1).device.type == "cpu"
        raise KeyError
    assert torch.ones(1).dtype == torch.float32


def test_default_is_meta() -> None:
    with OnDevice(dtype=torch.float32):
        assert nn.Linear(1000, 1000).weight.is_meta
