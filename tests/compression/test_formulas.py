"""Each quantizer and mask against its formula, written out again here in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepspeed.compression.basic_layer import LinearLayer_Compress, QuantAct
from deepspeed.compression.scheduler import bits_at, quantized_share
from deepspeed.compression.snip import SnipMomentum, parse_pattern, scores_of, share_at
from deepspeed.compression.utils import (
    AsymQuantizer,
    BinaryQuantizer,
    SymQuantizer,
    TernaryQuantizer,
    TopKBinarizer,
)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_group(x: Tensor, groups: int, formula: Any) -> Tensor:
    rows = [formula(row) for row in x.numpy().reshape(groups, -1)]
    return torch.from_numpy(np.stack(rows).astype(np.float32)).view(x.shape)


def symmetric(bits: int) -> Any:
    def formula(x: np.ndarray) -> np.ndarray:
        scale = np.float32(np.abs(x).max() / 2 ** (bits - 1))
        return np.clip(np.round(x / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale

    return formula


def asymmetric(bits: int) -> Any:
    def formula(x: np.ndarray) -> np.ndarray:
        scale = np.float32((x.max() - x.min()) / 2**bits)
        zero = np.round(x.min() / scale) * scale
        return np.clip(np.round((x - zero) / scale), 0, 2**bits - 1) * scale + zero

    return formula


def ternary(x: np.ndarray) -> np.ndarray:
    kept = np.abs(x) > 0.7 * np.abs(x).mean()
    return np.sign(x) * kept * np.abs(x)[kept].mean()


def binary(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1, -1) * np.abs(x).mean()


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("bits", [3, 4, 8, 12])
def test_quantized_to_bits(bits: int, groups: int) -> None:
    x = values(6, 10)
    for quantizer, formula in ((SymQuantizer, symmetric(bits)), (AsymQuantizer, asymmetric(bits))):
        told = quantizer.apply(x, bits, None, None, groups)
        torch.testing.assert_close(told, by_group(x, groups, formula), rtol=1e-6, atol=1e-7)
        for row in told.view(groups, -1):
            assert row.unique().numel() <= 2**bits
        half = quantizer.apply(x.bfloat16(), bits, None, None, groups)
        assert half.dtype == torch.bfloat16
        assert torch.equal(half, quantizer.apply(x.bfloat16().float(), bits, None, None, groups).bfloat16())


@pytest.mark.parametrize("groups", [1, 6])
def test_ternary_and_binary(groups: int) -> None:
    x = values(6, 10)
    for quantizer, formula in ((TernaryQuantizer, ternary), (BinaryQuantizer, binary)):
        told = quantizer.apply(x, 2, None, None, groups)
        torch.testing.assert_close(told, by_group(x, groups, formula), rtol=1e-6, atol=1e-7)


def test_gradients_pass_straight_through() -> None:
    for quantizer in (SymQuantizer, AsymQuantizer, TernaryQuantizer, BinaryQuantizer):
        x = values(4, 4).requires_grad_()
        slope = values(4, 4, seed=1)
        quantizer.apply(x, 4, None, None, 2).backward(slope)
        assert torch.equal(x.grad, slope)
    scores = values(4, 4).requires_grad_()
    TopKBinarizer.apply(scores, 0.5, False).backward(slope)
    assert torch.equal(scores.grad, slope)


def test_a_given_range() -> None:
    x = values(50)
    told = SymQuantizer.apply(x, 8, torch.tensor(-1.0), torch.tensor(2.0))
    assert torch.equal(told, ((x / (2 / 128)).round().clamp(-128, 127) * (2 / 128)))
    told = AsymQuantizer.apply(x, 8, torch.tensor(-1.0), torch.tensor(2.0))
    scale = 3 / 256
    zero = round(-1 / scale) * scale
    torch.testing.assert_close(told, ((x - zero) / scale).round().clamp(0, 255) * scale + zero)


def test_groups_without_a_spread_stay() -> None:
    assert torch.equal(SymQuantizer.apply(torch.zeros(4), 8), torch.zeros(4))
    assert torch.equal(AsymQuantizer.apply(torch.full((4,), 0.3), 8), torch.full((4,), 0.3))
    assert torch.equal(TernaryQuantizer.apply(torch.zeros(4), 2), torch.zeros(4))
    with pytest.raises(ValueError, match="quantize_groups must divide"):
        SymQuantizer.apply(torch.zeros(7), 8, None, None, 2)


def test_stochastic_rounding_is_right_on_average() -> None:
    x = values(64)
    torch.manual_seed(0)
    many = torch.stack([SymQuantizer.apply(x, 4, None, None, 1, "stochastic") for _ in range(4000)])
    step = x.abs().max() / 8
    inside = x < 7 * step
    assert ((many - x).abs()[:, inside] <= step * 1.0001).all()
    assert (many.mean(dim=0) - x)[inside].abs().max() < 0.05 * step


def test_masks_keep_the_largest() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [2.0, 0.0, 2.0]])
    assert TopKBinarizer.apply(scores, 0.5, False).tolist() == [
        [1, 0, 1],
        [1, 0, 0],
    ]  # of equal ones the first
    assert TopKBinarizer.apply(scores, 0.0, False).sum() == 0
    assert TopKBinarizer.apply(scores, 1.0, False).sum() == 6
    assert TopKBinarizer.apply(values(10), 0.35, False).sum() == 4  # rounded up
    assert TopKBinarizer.apply(scores, 0.9, True).tolist() == [[1, 0, 0], [0, 0, 0]]


def test_schedules() -> None:
    assert [bits_at(step, 8, 4, 3) for step in range(15)] == [8, 8, 8, 7, 7, 7, 6, 6, 6, 5, 5, 5, 4, 4, 4]
    assert bits_at(0, 8, 8, 0) == 8
    assert [quantized_share(step, 0.25) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert share_at(10, 10, 20) == 0.0 and share_at(20, 10, 20) == share_at(99, 10, 20) == 1.0
    assert share_at(15, 10, 20) == 1 - 0.5**3
    assert share_at(10, 10, 10) == 1.0


def test_static_range_of_activations() -> None:
    act = QuantAct(act_range_momentum=0.9, quant_mode="asymmetric")
    first, second = values(3, 4), values(3, 4, seed=1) * 3
    act(first, 8)
    assert torch.equal(act.x_min_max, torch.stack([first.min(), first.max()]))
    act(second, 8)
    expected = torch.stack([first.min(), first.max()]) * 0.9 + torch.stack([second.min(), second.max()]) * 0.1
    torch.testing.assert_close(act.x_min_max, expected)
    act.eval()
    told = act(first * 9, 8)
    assert torch.equal(act.x_min_max, expected)
    assert torch.equal(told, AsymQuantizer.apply(first * 9, 8, *expected))


def test_patterns() -> None:
    assert parse_pattern("4x1") == (4, 1, False)
    assert parse_pattern("2:4") == (2, 4, True)
    for wrong in ("4", "ax1", "4:4", "0x1"):
        with pytest.raises(ValueError, match="block_pattern"):
            parse_pattern(wrong)


def pruner(pattern: str, dense_ratio: float, end: int = 0) -> tuple[SnipMomentum, list[Any]]:
    layers = [LinearLayer_Compress(8, 8), LinearLayer_Compress(8, 4)]
    for layer in layers:
        layer.enable_sparse_pruning(dense_ratio, "snip_momentum")
    modules = {str(i): layer for i, layer in enumerate(layers)}
    return (
        SnipMomentum(modules, begin=0, end=end, stride=2, pattern=pattern, dense_ratio=dense_ratio),
        layers,
    )


def test_blocks_with_the_smallest_scores_go() -> None:
    made, layers = pruner("4x1", 0.25)
    for i, layer in enumerate(layers):
        layer.weight.grad = values(*layer.weight.shape, seed=i)
    made.on_before_optimizer_step()
    expected = [(layer.weight * layer.weight.grad).abs().detach() for layer in layers]
    for layer, score in zip(layers, expected, strict=True):
        assert torch.equal(scores_of(layer), score)
    made.on_after_optimizer_step()
    blocks = torch.cat([score.view(-1, 4, 8).mean(dim=1).view(-1) for score in expected])
    least = blocks.sort(descending=True).values[5]  # 24 blocks, of which 6 stay
    for layer, score in zip(layers, expected, strict=True):
        kept = (score.view(-1, 4, 8).mean(dim=1) >= least).repeat_interleave(4, 0)
        assert torch.equal(layer.sparse_pruning_mask, kept)


def test_scores_have_momentum_and_pruning_is_gradual() -> None:
    made, layers = pruner("1x2", 0.5, end=4)
    score, dense = torch.zeros_like(layers[0].weight), []
    for step in range(6):
        for layer in layers:
            layer.weight.grad = values(*layer.weight.shape, seed=step)
        before = layers[0].sparse_pruning_mask.clone()
        made.on_before_optimizer_step()
        if step <= 4:
            score = 0.9 * score + (layers[0].weight * layers[0].weight.grad).abs().detach()
            torch.testing.assert_close(scores_of(layers[0]), score)
        made.on_after_optimizer_step()
        assert not (layers[0].sparse_pruning_mask & ~before).any()
        dense.append(sum(int(layer.sparse_pruning_mask.sum()) for layer in layers))
    assert dense == [
        96,
        96,
        54,
        54,
        48,
        48,
    ]  # at 0, 2 and 4: 0, 7/8 and all of the sparsity 0.5; of 48 pairs 27 stay


def test_two_of_four() -> None:
    made, layers = pruner("2:4", 0.5)
    for layer in layers:
        layer.weight.grad = values(*layer.weight.shape, seed=3)
    made.on_before_optimizer_step()
    made.on_after_optimizer_step()
    for layer in layers:
        mask = layer.sparse_pruning_mask.view(-1, 4)
        assert (mask.sum(dim=1) == 2).all()
        score = scores_of(layer).view(-1, 4)
        assert (torch.where(mask, score, torch.inf).amin(1) >= torch.where(mask, -1.0, score).amax(1)).all()
