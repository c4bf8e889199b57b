"""Clean models whose weights are packed: the same values as in floating point, in bits x elements and the scales."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.compression import init_compression, redundancy_clean
from deepspeed.compression.packed import (
    PackedConv2d,
    PackedEmbedding,
    PackedLinear,
    PackedWeight,
    sums_integers_exactly,
)
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.config.sections.compression import get_compression_config
from deepspeed.ops import small_product
from deepspeed.ops.formats.packing import pack_bits, unpack_bits
from tests import forked
from tests.compression.models import (
    ACTIVATIONS,
    HEADS_HALF,
    HIDDEN,
    INNER,
    ROWS,
    SPARSE,
    Bert,
    ConvNet,
    batch,
    config,
    technique,
)
from tests.pool import distributed


def weights(bits: int, kind: str = "symmetric", groups: int = 4, modules: Any = ("layer",)) -> dict[str, Any]:
    return technique(
        "weight_quantization",
        list(modules),
        {"start_bits": bits, "target_bits": bits},
        quantize_groups=groups,
        quantization_type=kind,
        quantize_weight_in_forward=True,
    )


def activations(kind: str, calibration: str = "dynamic", modules: Any = ("layer",)) -> dict[str, Any]:
    shared = {"quantization_type": kind, "range_calibration": calibration}
    return technique("activation_quantization", list(modules), {"bits": 8}, **shared)


def both(model: nn.Module, asked: dict[str, Any]) -> tuple[Any, Any]:
    """The model cleaned in floating point, and packed."""
    prepared = init_compression(model, asked)
    packed = copy.deepcopy(prepared)
    return redundancy_clean(prepared, asked).eval(), redundancy_clean(packed, asked, packed=True).eval()


def same_weights(plain: nn.Module, packed: nn.Module) -> int:
    """Return the number of packed weights; all values are the same bit for bit."""
    others = dict(packed.named_modules())
    for name, module in plain.named_modules():
        weight = vars(module)["_parameters"].get("weight")
        if weight is not None:
            found: Any = others[name].weight
            assert found.dtype == weight.dtype and torch.equal(found, weight), name
    return sum(isinstance(module, PackedWeight) for module in others.values())


def saved_size(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue())


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_width(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 37), dtype=torch.uint8)
    packed = torch.stack([pack_bits(row, bits) for row in codes])
    assert packed.shape == (3, math.ceil(37 * bits / 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed, bits, 37), codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_the_same_values_in_bits_times_elements(bits: int, kind: str) -> None:
    plain, packed = both(Bert(), config(weights(bits, kind)))
    assert same_weights(plain, packed) == 12
    query: Any = packed.layer[0].attention.self.query
    assert type(query) is PackedLinear and "weight" not in packed.layer[0].attention.self.query.state_dict()
    held = {name: buffer.nbytes for name, buffer in query.named_buffers()}
    expected = {"weight_packed": bits * HIDDEN * HIDDEN // 8, "weight_scales": 4 * 4}
    if kind == "asymmetric" and bits > 2:
        expected["weight_zeros"] = 4 * 4
    assert held == expected
    tokens, _ = batch(1)
    torch.testing.assert_close(packed(tokens), plain(tokens))


class Wide(nn.Module):
    """Two layers that the kernels can read."""

    def __init__(self, inputs: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 48), nn.Linear(48, inputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("bits, groups", [(8, 1), (8, 16), (8, 96), (4, 48), (4, 96)])
@pytest.mark.parametrize("rows", [1, 11, 70])
def test_kernels_read_what_they_can(
    bits: int, groups: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, packed = both(Wide().bfloat16(), config(weights(bits, groups=groups, modules=["first"])))
    assert same_weights(plain, packed) == 1 and packed.first.packing.in_runs
    assert packed.first.weight_packed.nbytes == 48 * 256 * bits // 8
    called = []
    run = small_product.SmallProducts.__call__
    monkeypatch.setattr(
        small_product.SmallProducts, "__call__", lambda *given: called.append(1) or run(*given)
    )
    x = torch.randn(rows, 256).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(packed(x), plain(x), rtol=0.02, atol=0.02)
    kind = small_product.Weights.INT8 if bits == 8 else small_product.Weights.INT4
    assert bool(called) == small_product.by_kernel(kind, rows)
    x = torch.randn(3, 256).bfloat16().requires_grad_()
    packed(x).sum().backward()
    other = x.detach().clone().requires_grad_()
    plain(other).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
@pytest.mark.parametrize("inputs", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    "bits, kind", [(8, "symmetric"), (8, "asymmetric"), (4, "asymmetric"), (2, ""), (1, "")]
)
def test_products_of_integers_are_those_of_training(
    bits: int, kind: str, inputs: str, calibration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind or "symmetric"
    asked = config(weights(bits, kind, modules="*"), activations(inputs, calibration, modules="*"))
    trained = init_compression(Wide(), asked)
    compression_scheduler(trained, get_compression_config(asked))
    x = torch.randn(2, 5, 256) + 0.3
    x[0, 0] = 0
    for _ in range(2):
        trained(x)
    trained.eval()
    packed = redundancy_clean(copy.deepcopy(trained), asked, packed=True)
    count = []
    expected = 3 if sums_integers_exactly() else 0
    product = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *given: count.append(1) or product(*given))
    # a value between two integers may be rounded to the other one in the second layer
    torch.testing.assert_close(packed(x), trained(x), rtol=1e-4, atol=2e-2 if bits > 2 else 5e-2)
    torch.testing.assert_close(packed.first(x), trained.first(x), rtol=1e-4, atol=1e-5)
    assert len(count) == expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    torch.testing.assert_close(packed.first(x), trained.first(x))
    assert len(count) == expected
    reloaded = redundancy_clean(init_compression(Wide(), asked), asked, packed=True).eval()
    reloaded.load_state_dict(packed.state_dict())
    assert torch.equal(reloaded(x), packed(x))


def test_products_that_are_cut_off_at_16_bits_are_not_taken() -> None:
    """As on a CPU without VNNI, whose sums of neighbouring products torch does not widen."""
    code = """
import torch
from deepspeed.compression.packed import sums_integers_exactly
a, b = (torch.randint(-128, 128, (32, 64), dtype=torch.int8) for _ in range(2))
print(sums_integers_exactly(), bool((torch._int_mm(a, b.t()) == a.int() @ b.int().t()).all()))
"""
    for isa in ("AVX2", "DEFAULT"):
        told = forked.run(["-c", code], env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa})
        says, holds = told.stdout.split()
        assert says == holds, (isa, told.stderr)


INNERMOST = ["query", "output.dense"]
PRUNED = {
    "rows and heads": [weights(8), ROWS, HEADS_HALF],
    "one group": [weights(4, groups=1), ROWS, HEADS_HALF],
    "asymmetric": [weights(8, "asymmetric"), ROWS, HEADS_HALF],
    "binary": [weights(1), ROWS, HEADS_HALF],
    "groups of columns": [weights(4, groups=64, modules=INNERMOST), ROWS, HEADS_HALF],
    "groups of columns, asymmetric": [weights(4, "asymmetric", 64, INNERMOST), ROWS, HEADS_HALF],
    "all": [weights(4), ACTIVATIONS, SPARSE, ROWS, HEADS_HALF],
    "sparse": [weights(8), SPARSE],
    "sparse, asymmetric": [weights(4, "asymmetric", 1), SPARSE],
    "sparse, binary": [weights(1), SPARSE],
    "silent rows": [weights(1), technique("row_pruning", ["query"], {"dense_ratio": 0.5}, method="l1")],
}


@pytest.mark.parametrize("name", PRUNED)
def test_pruned_and_packed(name: str) -> None:
    asked = config(*PRUNED[name])
    plain, packed = both(Bert(), asked)
    assert same_weights(plain, packed) == (6 if name.startswith("groups") else 12)
    tokens, _ = batch(2)
    if "activation_quantization" not in asked["compression_training"]:
        torch.testing.assert_close(packed(tokens), plain(tokens))
    skeleton = redundancy_clean(init_compression(Bert(), asked), asked, packed=True)
    missing = skeleton.load_state_dict(packed.state_dict())
    assert not missing.missing_keys and not missing.unexpected_keys
    assert torch.equal(skeleton.eval()(tokens), packed(tokens))
    if "row_pruning" in asked["compression_training"] and name != "silent rows":
        assert packed.layer[0].intermediate["dense"].weight.shape == (INNER // 2, HIDDEN)
        assert packed.layer[0].output["dense"].in_features == INNER // 2


def test_groups_that_lost_elements_stay_in_floating_point() -> None:
    asked = config(weights(8, groups=3, modules=["intermediate"]), ROWS)
    plain, packed = both(Bert(), asked)
    assert same_weights(plain, packed) == 2  # 3 groups of 8 rows each
    asked = config(weights(8, groups=128 * 3, modules=["layer.0.output"]), ROWS)
    plain, packed = both(Bert(), asked)
    assert same_weights(plain, packed) == 1
    asked = config(weights(8, groups=6, modules=["layer.0.output"]), ROWS)  # of 64: 2 2/3 rows of 24
    plain, packed = both(Bert(), asked)
    assert same_weights(plain, packed) == 0


def test_convolutions_and_channels() -> None:
    asked = config(
        technique("channel_pruning", ["conv1"], {"dense_ratio": 0.5}, [["conv2", "bn1"]], method="topk"),
        weights(8, modules=["conv"]),
        activations("symmetric", modules=["conv2"]),
    )
    plain, packed = both(ConvNet(), asked)
    assert same_weights(plain, packed) == 2 and type(packed.conv2) is PackedConv2d
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(packed.conv1(images), plain.conv1(images))
    x = torch.randn(2, 4, 8, 8)
    steps = x.abs().amax(dim=(1, 2, 3), keepdim=True) / 128
    rounded = (x / steps).round().clamp(-128, 127) * steps
    torch.testing.assert_close(packed.conv2(x), plain.conv2(rounded))


@pytest.mark.parametrize("bits, groups", [(1, 32), (2, 1), (8, 16), (3, 32), (8, 64), (4, 1)])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_embeddings(bits: int, groups: int, kind: str) -> None:
    plain, packed = both(Bert(), config(weights(bits, kind, groups, ["embeddings"])))
    assert same_weights(plain, packed) == 1 and type(packed.embeddings) is PackedEmbedding
    tokens, _ = batch(3)
    assert torch.equal(packed.embeddings(tokens), plain.embeddings(tokens))
    assert torch.equal(packed.embeddings(tokens[0, 0]), plain.embeddings(tokens[0, 0]))


def test_tied_weights_stay_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    plain, packed = both(Tied(), config(weights(4, modules=["embed", "head"])))
    assert packed.head.weight is packed.embed.weight and torch.equal(packed.head.weight, plain.head.weight)


def test_size_on_disk() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])

    numel, sizes = 4 * 256 * 256, {}
    for bits in (8, 4, 2, 1):
        _, packed = both(Large(), config(weights(bits, groups=256)))
        sizes[bits] = saved_size(packed)
        assert sizes[bits] - (numel * bits // 8 + 4 * 256 * 4) < 4096  # names and shapes
        again = pickle.loads(pickle.dumps(packed.layers[0]))
        assert torch.equal(again.weight, packed.layers[0].weight)
    assert saved_size(Large()) / sizes[1] > 24


def test_another_dtype() -> None:
    _, packed = both(Wide(), config(weights(4, groups=48, modules="*")))
    scales = packed.first.weight_scales.clone()
    packed.bfloat16()
    assert packed.first.weight_scales.dtype == torch.float32 and torch.equal(
        packed.first.weight_scales, scales
    )
    assert packed.first.weight.dtype == packed.first.bias.dtype == torch.bfloat16
    assert packed.first.weight_packed.dtype in (torch.int32, torch.uint8)
    with torch.no_grad():
        assert packed(torch.randn(2, 256).bfloat16()).dtype == torch.bfloat16


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_of_an_engine(stage: int) -> None:
    asked = config(
        weights(4),
        ROWS,
        HEADS_HALF,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        optimizer={"type": "Adam", "params": {"lr": 0.01}},
    )
    engine, *_ = deepspeed.initialize(model=init_compression(Bert(), asked), config=asked)
    for step in range(2):
        engine.backward(engine(*batch(2 * step + torch.distributed.get_rank())))
        engine.step()
    engine.eval()
    tokens, _ = batch(9)
    with torch.no_grad():
        before = engine(tokens)
        model = redundancy_clean(engine, asked, packed=True).module
        torch.testing.assert_close(model(tokens), before, rtol=1e-5, atol=1e-6)
    assert sum(isinstance(module, PackedWeight) for module in model.modules()) == 12
    for tensor in model.state_dict().values():
        other = tensor.clone()
        torch.distributed.broadcast(other, 0)
        assert torch.equal(other, tensor)
