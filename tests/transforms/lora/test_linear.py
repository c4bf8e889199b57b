"""Linear layers with frozen, quantized weights and adapters."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.ops import op_builder
from deepspeed.ops.fp_quantizer import FP_Quantize
from deepspeed.transforms.lora import Init, LoRAConfig, OptimizedLinear, QuantizationConfig, init_lora
from deepspeed.transforms.lora.optimized_linear import LoRAOptimizedLinear
from deepspeed.transforms.lora.quantization import QuantizedLinear, QuantizedParameter
from tests.pool import distributed

LORA = LoRAConfig(lora_r=4, lora_alpha=8.0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def config(bits: int = 8) -> QuantizationConfig:
    return QuantizationConfig(q_bits=bits, group_size=64)


def rounded(values: Tensor, bits: int = 8) -> Tensor:
    quantizer = FP_Quantize(config(bits))
    quantized = quantizer.quantize(values, q_bits=bits)
    assert isinstance(quantized, Tensor)
    return quantizer.dequantize(quantized, q_bits=bits)


def test_the_kind_of_layer_follows_the_configs() -> None:
    assert type(OptimizedLinear(8, 4, dtype=torch.float32)) is nn.Linear
    assert type(OptimizedLinear(8, 4, quantization_config=config())) is QuantizedLinear
    assert type(OptimizedLinear(8, 4, lora_config=LORA)) is LoRAOptimizedLinear
    both = OptimizedLinear(8, 4, lora_config=LORA, quantization_config=config())
    assert isinstance(both.weight, QuantizedParameter)
    with pytest.raises(TypeError, match="lora_config must be a LoRAConfig"):
        OptimizedLinear(8, 4, lora_config={"lora_r": 4})  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [6, 8, 12])
def test_a_quantized_parameter(bits: int) -> None:
    values = torch.randn(32, 48, dtype=torch.bfloat16)
    parameter = QuantizedParameter(values, quantization_config=config(bits))
    assert parameter.dtype == torch.uint8 and not parameter.requires_grad
    assert parameter.numel() == values.numel() * bits // 8 + 4 * values.numel() // 64
    assert parameter.dequantized().dtype == torch.bfloat16
    assert torch.equal(parameter.dequantized(), rounded(values, bits))
    stored = io.BytesIO()
    torch.save(parameter, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(parameter),
        parameter.to("cpu"),
        parameter.to(torch.float32),
        torch.load(stored, weights_only=False),
    ):
        assert isinstance(other, QuantizedParameter) and other.dtype == torch.uint8
        assert torch.equal(other.dequantized().to(torch.bfloat16), parameter.dequantized())
    parameter.offload()
    parameter.offload(revert=True)
    assert torch.equal(parameter.dequantized(), rounded(values, bits))
    with pytest.raises(ValueError, match="requires_grad=True"):
        QuantizedParameter(values, requires_grad=True)


def test_a_quantized_layer() -> None:
    layer = QuantizedLinear(32, 16, bias=True, quantization_config=config(), dtype=torch.float32)
    values = torch.randn(16, 32)
    layer.load_state_dict({"weight": values, "bias": torch.ones(16)})
    x = torch.randn(5, 32, requires_grad=True)
    expected = nn.functional.linear(x, rounded(values), layer.bias)
    torch.testing.assert_close(layer(x), expected)
    (mine,), (theirs,) = (torch.autograd.grad(out.square().sum(), x) for out in (layer(x), expected))
    torch.testing.assert_close(mine, theirs)
    again = QuantizedLinear(32, 16, bias=True, quantization_config=config(), dtype=torch.float32)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    assert torch.equal(layer.to(torch.bfloat16)(x.bfloat16()), layer(x.bfloat16()))


def test_backward_keeps_no_dequantized_weight() -> None:
    layer = OptimizedLinear(64, 64, lora_config=LORA, quantization_config=config(), dtype=torch.float32)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    assert all(tensor.numel() < 64 * 64 for tensor in kept)


def test_adapters() -> None:
    layer: Any = OptimizedLinear(32, 16, bias=True, lora_config=LORA, dtype=torch.float32)
    x = torch.randn(5, 32)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.full_weight(), layer.bias))
    with torch.no_grad():
        layer.lora_weight_2.weight.normal_()
    merged = layer.full_weight() + 2.0 * layer.lora_weight_2.weight @ layer.lora_weight_1.weight
    torch.testing.assert_close(layer(x), nn.functional.linear(x, merged, layer.bias), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.linear_without_F_linear(x, merged), nn.functional.linear(x, merged))
    trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
    assert trained == {"lora_weight_1.weight", "lora_weight_2.weight"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.q_proj = nn.Linear(64, 64)
        self.down_proj = nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down_proj(torch.tanh(self.q_proj(x))))


def quantized_model(bits: int = 8, quantized: bool = True) -> Model:
    torch.manual_seed(1)
    state = Model().state_dict()
    with Init(LORA, config(bits) if quantized else None):
        model = Model()
    assert nn.Linear.__name__ == "Linear" and type(nn.Linear(2, 2)) is nn.Linear
    model.load_state_dict(state)
    torch.manual_seed(2)
    init_lora(model)
    return model


def test_an_unchanged_model() -> None:
    torch.manual_seed(1)
    plain, model = Model(), quantized_model()
    assert isinstance(model.q_proj.weight, QuantizedParameter)
    assert isinstance(model.head, LoRAOptimizedLinear) and model.head.disabled
    assert torch.equal(model.q_proj.full_weight(), rounded(plain.q_proj.weight.detach()))
    assert torch.equal(model.head.weight, plain.head.weight)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{layer}.lora_weight_{n}.weight" for layer in ("q_proj", "down_proj") for n in (1, 2)}
    ids = torch.arange(32)[None]
    assert (model(ids) - plain(ids)).norm() < 0.05 * plain(ids).norm()
    bytes_of_base = sum(p.nbytes for p in (model.q_proj.weight, model.down_proj.weight))
    assert bytes_of_base < 1.07 * 2 * 64 * 64


def engine_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def train(engine: Any, steps: int = 4) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 32, (2, 8), generator=generator)
        loss = nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def by_torch(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 32, (2, 8), generator=generator)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_training_at_every_stage_and_resuming(stage: int, tmp_path: Any) -> None:
    expected = by_torch(quantized_model(), 6)
    engine, *_ = deepspeed.initialize(model=quantized_model(), config=engine_config(stage))
    assert train(engine, 4) == pytest.approx(expected[:4], rel=1e-5)
    if stage == 3:
        weight = engine.module.q_proj.weight
        assert weight.ds_tensor.dtype == torch.uint8
    engine.save_checkpoint(str(tmp_path))
    torch.manual_seed(9)
    with Init(LORA, config()):
        fresh = Model()
    init_lora(fresh)
    other, *_ = deepspeed.initialize(model=fresh, config=engine_config(stage))
    other.load_checkpoint(str(tmp_path))
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        torch.randint(0, 32, (2, 8), generator=generator)
    found = []
    for _ in range(2):
        ids = torch.randint(0, 32, (2, 8), generator=generator)
        loss = nn.functional.cross_entropy(other(ids).flatten(0, 1), ids.flatten())
        other.backward(loss)
        other.step()
        found.append(loss.item())
    assert found == pytest.approx(expected[4:], rel=1e-5)


def test_what_cannot_be_is_refused() -> None:
    for wrong, told in (
        (LoRAConfig(base_weight_sharding=2), "ZeRO stage 3"),
        (LoRAConfig(lora_r=0), "lora_r=0"),
        (LoRAConfig(offload_ratio=1.5), "offload_ratio=1.5"),
    ):
        with pytest.raises(ValueError, match=told):
            OptimizedLinear(8, 8, lora_config=wrong)


@pytest.mark.parametrize("bits", [None, 8])
@distributed(world_size=2)
def test_layers_that_ask_for_shards_are_whole(bits: int | None) -> None:
    quantization = None if bits is None else config(bits)
    layers: list[Any] = []
    for sharding in (1, 2):
        torch.manual_seed(3)
        lora = LoRAConfig(lora_r=4, base_weight_sharding=sharding)
        layers.append(OptimizedLinear(64, 32, lora_config=lora, quantization_config=quantization))
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    assert torch.equal(layers[0](x), layers[1](x)) and layers[1].full_weight().shape == (32, 64)
    with pytest.raises(ValueError, match="base_weight_sharding=3"):
        OptimizedLinear(64, 32, lora_config=LoRAConfig(base_weight_sharding=3))


def test_a_quantized_parameter_is_copied_with_its_attributes():
    """As loaders do, which know nothing of the class."""
    param = QuantizedParameter(
        torch.randn(8, 64), quantization_config=QuantizationConfig(q_bits=6, group_size=64)
    )
    assert param.is_quantized_now
    copied = QuantizedParameter(param.data, **param.__dict__)
    assert torch.equal(copied.data, param.data) and copied.quantization_config == param.quantization_config
    assert torch.equal(copied.dequantized(), param.dequantized())


def test_the_builder_knows_the_formats():
    builder = op_builder.FPQuantizerBuilder
    assert builder.get_default_quant_dtype() == torch.uint8
    assert [builder.get_quant_range(bits) for bits in (4, 6)] == [6.0, 28.0]
    with pytest.raises(ValueError, match="q_bits=5"):
        builder.get_quant_range(5)
    assert op_builder.ALL_OPS["fp_quantizer"] is builder and builder().is_compatible()


@distributed(world_size=1)
def test_layers_of_other_names_get_adapters_where_no_name_is_a_target():
    with Init(lora_config=LORA):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    init_lora(model)
    for number in (0, 2):
        trained = [name for name, param in model[number].named_parameters() if param.requires_grad]
        assert trained == ["lora_weight_1.weight", "lora_weight_2.weight"]
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    before = model[2].lora_weight_2.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert not torch.equal(model[2].lora_weight_2.weight, before)
    engine.destroy()


def test_a_share_of_the_layers_is_offloaded() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict({"q_proj": torch.nn.Linear(8, 8)}) for _ in range(8)])

    with Init(LoRAConfig(lora_r=2, offload_ratio=0.25)):
        model = Model()
    init_lora(model)
    offloads = [layer["q_proj"].offloads for layer in model.layers]  # type: ignore[index]
    assert offloads == [False, False, False, True] * 2
    alone = OptimizedLinear(8, 8, lora_config=LoRAConfig(lora_r=2, offload_ratio=0.5))
    assert alone.offloads and alone(torch.ones(1, 8, dtype=torch.bfloat16)).shape == (1, 8)
