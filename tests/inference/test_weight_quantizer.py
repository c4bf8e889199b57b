"""``WeightQuantization``: integers and scales give the weights back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepspeed.compat.weight_quantizer import WeightQuantization

NAMES = {
    "attention.query_key_value.weight": (24, 8),
    "attention.dense.weight": (8, 8),
    "mlp.dense_h_to_4h.weight": (32, 8),
    "mlp.dense_4h_to_h.weight": (8, 32),
}


def whole(codes: Tensor, scales: Tensor, groups: int) -> Tensor:
    return (codes.float().view(groups, -1) * scales[:groups, None]).view(codes.shape)


def test_a_checkpoint_of_megatron() -> None:
    weights = {
        f"layers.{layer}.{name}": torch.randn(shape) for layer in (0, 1) for name, shape in NAMES.items()
    }
    weights["norm.weight"] = torch.ones(3)
    codes, scales = WeightQuantization().sd_quantize_megatron(dict(weights), 8, 2)
    assert scales.shape == (2, 4, 4) and codes["norm.weight"] is weights["norm.weight"]
    for layer in (0, 1):
        for kind, (name, groups) in enumerate(zip(NAMES, (2, 2, 4, 4), strict=True)):
            key = f"layers.{layer}.{name}"
            assert codes[key].dtype is torch.int8
            step = float(scales[layer, kind].max())
            torch.testing.assert_close(
                whole(codes[key], scales[layer, kind], groups), weights[key], rtol=0, atol=step
            )


def test_shares_of_ranks_and_shapes() -> None:
    quantizer = WeightQuantization(mlp_extra_grouping=False, mp_size=2)
    assert quantizer.is_mlp(torch.empty(16, 8)) and quantizer.is_qkv(torch.empty(12, 8))
    for name, shape in NAMES.items():
        quantizer.Quantize([torch.randn(shape)], 8, 4, name)
    ranks = quantizer.merge_scales_split(2)
    assert [[tuple(layer.shape) for layer in rank] for rank in ranks] == [[(1, 4, 2)], [(1, 4, 2)]]
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], -1), quantizer.merge_scales())
    with pytest.raises(ValueError, match="7 equal groups"):
        quantizer.quantize_data(torch.randn(4), 8, 7)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


class Policy:
    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def attention(self) -> tuple[Tensor, ...]:
        return self.layer.qkv.weight, self.layer.qkv.bias, self.layer.out.weight, self.layer.out.bias

    def mlp(self) -> tuple[Tensor, ...]:
        return self.layer.up.weight, self.layer.up.bias, self.layer.down.weight, self.layer.down.bias


def test_a_model() -> None:
    model = nn.Sequential(Layer(), nn.ReLU())
    before = model[0].get_submodule("up").get_parameter("weight").detach().clone()
    same, scales = WeightQuantization().model_quantize(model, {Layer: Policy}, 8, 2)
    assert same is model and scales.shape == (1, 4, 4)
    codes = model[0].get_submodule("up").get_parameter("weight").detach()
    torch.testing.assert_close(whole(codes, scales[0, 2], 4), before, rtol=0, atol=float(scales.max()))
    with pytest.raises(ValueError, match="none of the layers"):
        WeightQuantization().model_quantize(nn.ReLU(), {Layer: Policy}, 8, 2)
