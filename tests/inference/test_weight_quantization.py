"""Weights in groups of few bits: the documented parts, and the section ``weight_quantization`` with ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.transforms.weight_quantization.quantization import (
    QuantizedEmbedding,
    QuantizedLinear,
    _init_group_wise_weight_quantization,
)
from deepspeed.transforms.weight_quantization.utils import (
    DeQuantizer,
    Quantizer,
    concat_to_compat_param,
    parts_of_param,
    recursive_setattr,
)
from tests.pool import distributed


def settings(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "group_size": 16, "group_dim": 1, "symmetric": False} | more


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_off_by_half_a_step(bits: int, dim: int, symmetric: bool, dtype: torch.dtype) -> None:
    values = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = settings(bits, group_dim=dim, symmetric=symmetric)
    words, scale, least = Quantizer(config).quantize(values)
    assert words.dtype is torch.uint8 and words.numel() == values.numel() * bits // 8
    assert scale.numel() == least.numel() == values.numel() // 16
    found = DeQuantizer(config, torch.float32).dequantize(words, scale, least)
    grouped = (32 // 16, 16, 48) if dim == 0 else (32, 48 // 16, 16)
    error = (found - values.float()).abs().view(grouped)
    assert (error <= 0.51 * scale.float() + 2e-3 * values.abs().max()).all()
    joined = concat_to_compat_param(words, scale, least, return_param=False)
    again = parts_of_param(joined, config, values.shape, scale.dtype)
    assert all(torch.equal(one, other) for one, other in zip(again, (words, scale, least), strict=True))


def test_impossible_settings_are_named() -> None:
    for config, words in (
        (settings(3), "num_bits=3"),
        (settings(4, group_size=7), "group_size=7"),
        (settings(4, groups=3), "'groups' is not one of"),
    ):
        with pytest.raises(ValueError, match=words):
            Quantizer(config)
    with pytest.raises(ValueError, match="does not divide dim 1"):
        Quantizer(settings(4)).quantize(torch.zeros(4, 20))


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.odd = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(self.odd(hidden))


TOKENS = torch.arange(28).view(2, 14)


def test_layers_are_chosen_by_their_names() -> None:
    module = Texts()
    wanted = module(TOKENS).detach()
    chosen = {"layers": settings(8), "layers.1": settings(4), "table": settings(8), "head": settings(8)}
    made = _init_group_wise_weight_quantization(module, {"weight_quantization": {"post_init_quant": chosen}})
    assert made is module and [type(each) for each in module.layers] == [QuantizedLinear] * 3
    assert isinstance(module.layers[0], nn.Linear) and type(module.table) is QuantizedEmbedding
    assert type(module.odd) is nn.Linear and module.head.weight is module.table.weight
    assert module.layers[1].config["num_bits"] == 4
    with torch.no_grad():
        found = module(TOKENS)
        torch.testing.assert_close(module.table(TOKENS), module.table.values()[TOKENS])
    assert (found - wanted).norm() < 0.1 * wanted.norm()
    module.load_state_dict(module.state_dict())
    assert module.bfloat16()(TOKENS).dtype is torch.bfloat16
    recursive_setattr(module, "layers.1", nn.Identity())
    assert type(module.layers[1]) is nn.Identity


def test_quantized_embeddings_clip_what_they_look_up() -> None:
    """As ``max_norm`` says: rows longer than that are scaled down, also of the quantized table."""
    torch.manual_seed(0)
    plain = nn.Embedding(30, 32, max_norm=3.0, norm_type=2.0)
    with torch.no_grad():
        plain.weight[:4] *= 0.1
    quantized = QuantizedEmbedding(settings(8), plain)
    found, wanted = quantized(TOKENS), plain(TOKENS).detach()
    assert found.norm(dim=-1).max() <= 3.0 + 1e-4 and found.shape == (2, 14, 32)
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)


def zero_config(folder: Path, offload: str, **section: Any) -> dict[str, Any]:
    kept = {"offload_param": {"device": offload, "nvme_path": str(folder)}} if offload != "none" else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **kept},
        "weight_quantization": section,
    }


def test_nothing_made_for_a_product_is_kept_until_backward() -> None:
    """Gradients are those of the values, and the only matrices that are saved are as small as the inputs."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 48)
    layer = QuantizedLinear(settings(4), plain)
    with torch.no_grad():
        plain.weight.copy_(layer.values())
    plain.weight.requires_grad_(False)
    x, y = (torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 64).requires_grad_() for _ in range(2))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        found = layer(x)
    assert all(numel <= x.numel() for numel in saved)
    wanted = plain(y)
    assert torch.equal(found, wanted)
    bias = layer.bias
    grads = torch.autograd.grad(found.square().sum(), (x, bias))
    for one, other in zip(grads, torch.autograd.grad(wanted.square().sum(), (y, bias)), strict=True):
        torch.testing.assert_close(one, other)


@distributed(world_size=2)
def test_other_weights_train_through_frozen_ones_at_stage_3(tmp_path: Path) -> None:
    module = Texts()
    config = zero_config(tmp_path, "none", post_init_quant={"layers": settings(8)})
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = deepspeed.initialize(model=module, config=config)[0]
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(engine(TOKENS).float().flatten(0, 1), TOKENS.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert type(module.layers[0]) is QuantizedLinear and losses == sorted(losses, reverse=True)
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_integers_are_what_stage_3_keeps_and_gathers(tmp_path: Path, offload: str) -> None:
    plain = Texts().bfloat16()
    with torch.no_grad():
        wanted = plain(TOKENS).float()
    module = Texts()
    config = zero_config(tmp_path, offload, quantized_initialization=settings(8))
    engine = deepspeed.initialize(model=module, config=config)[0]
    engine.module.eval()
    assert type(module.layers[0]) is QuantizedLinear and module.odd.weight.ds_numel < 2 * 32 * 32
    with torch.no_grad():
        for _ in range(2):
            found = module(TOKENS)
            assert found.dtype is torch.bfloat16
            assert (found.float() - wanted).norm() < 0.05 * wanted.norm()
    engine.destroy()


@distributed(world_size=1)
def test_after_zero_init_and_by_the_section_alone(tmp_path: Path) -> None:
    plain = Texts().bfloat16()
    config = zero_config(tmp_path, "none", num_bits=8, q_groups=2)
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = Texts()
    params = list(module.parameters())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(params):
        for own, param in zip(plain.parameters(), params, strict=True):
            own.copy_(param)
        wanted = plain(TOKENS).float()
    _init_group_wise_weight_quantization(
        module, {"weight_quantization": {"post_init_quant": {"layers": settings(8)}}}
    )
    engine = deepspeed.initialize(model=module, config=config)[0].eval()
    assert type(module.odd) is QuantizedLinear and module.odd.config["group_size"] == 16
    with torch.no_grad():
        assert (engine(TOKENS).float() - wanted).norm() < 0.05 * wanted.norm()
    engine.destroy()


@distributed(world_size=1)
def test_a_section_that_fits_no_layer_is_refused(tmp_path: Path) -> None:
    config = zero_config(tmp_path, "none", post_init_quant={"no_such": settings(4)})
    with pytest.raises(Exception, match="weight_quantization: no layer of Texts has a matching name"):
        deepspeed.initialize(model=Texts(), config=config)


def test_through_init_inference() -> None:
    wanted = Texts()(TOKENS).detach()
    for quant in (
        {"weight": {"post_init_quant": {"layers": settings(8)}}},
        {"weight": {"quantized_initialization": settings(8)}},
    ):
        module = Texts()
        engine = deepspeed.init_inference(module, dtype="fp32", quant=quant)
        assert type(module.layers[0]) is QuantizedLinear
        with torch.no_grad():
            assert (engine(TOKENS) - wanted).norm() < 0.05 * wanted.norm()
    module = Texts()
    engine = deepspeed.init_inference(
        module, dtype="int8", quant={"weight": {"q_type": "asymmetric", "q_groups": 2}}
    )
    assert type(module.odd) is QuantizedLinear
    with torch.no_grad():
        assert (engine(TOKENS).float() - wanted).norm() < 0.05 * wanted.norm()
    with pytest.raises(DeepSpeedConfigError, match="num_bits=5"):
        deepspeed.init_inference(
            Texts(), dtype="fp32", quant={"weight": {"quantized_initialization": settings(5)}}
        )
