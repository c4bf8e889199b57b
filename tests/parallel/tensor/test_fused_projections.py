"""Which rows of a fused projection a rank has: rows that say which head of which matrix they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.compat.module_inject import fusedqkv_utils as fused
from deepspeed.compat.module_inject import tp_shard

HEADS, SIZE = 8, 3
WIDTH = HEADS * SIZE


def layer(name: str) -> Any:
    return type(name, (nn.Module,), {})()


@pytest.fixture(autouse=True)
def numbers() -> Iterator[None]:
    tp_shard.set_num_kv_heads(HEADS)
    tp_shard.set_num_attention_heads(HEADS)
    tp_shard.set_n_embd(WIDTH)
    yield
    for forget in (tp_shard.set_num_kv_heads, tp_shard.set_num_attention_heads, tp_shard.set_n_embd):
        forget(None)


def rows(matrix: int, heads: int = HEADS) -> Tensor:
    """[heads, SIZE]: 1000 times the matrix (0 queries, 1 keys, 2 values), 10 times the head, the channel."""
    return 1000 * matrix + 10 * torch.arange(heads)[:, None] + torch.arange(SIZE)


def weight(*parts: Tensor) -> Tensor:
    """[rows, WIDTH] of what each row is."""
    return torch.cat([part.reshape(-1) for part in parts])[:, None].expand(-1, WIDTH).float()


def parts(name: str, whole: Tensor, ranks: int) -> list[Tensor]:
    found = [fused.prepare_tp_fused_qkvw(layer(name), whole, ranks, rank) for rank in range(ranks)]
    assert all(part is not None for part in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [2, 3])
def test_heads_with_their_query_key_and_value(ranks: int) -> None:
    whole = weight(torch.stack([rows(0), rows(1), rows(2)], 1))
    wanted = torch.arange(HEADS).tensor_split(ranks)
    for name in ("BloomBlock", "FalconDecoderLayer", "Unheard"):
        for part, heads in zip(parts(name, whole, ranks), wanted, strict=True):
            mine = torch.stack([rows(0)[heads], rows(1)[heads], rows(2)[heads]], 1)
            assert torch.equal(part, weight(mine))
    assert fused.fused_qkv_subparam_sizes(layer("BloomBlock"), whole.shape) == (3 * WIDTH,)


@pytest.mark.parametrize("ranks", [2, 3])
def test_three_matrices(ranks: int) -> None:
    whole = weight(rows(0), rows(1), rows(2))
    wanted = torch.arange(HEADS).tensor_split(ranks)
    for name in ("GLMBlock", "MptBlock", "BaichuanLayer", "QWenBlock", "Phi3DecoderLayer"):
        for part, heads in zip(parts(name, whole, ranks), wanted, strict=True):
            assert torch.equal(part, weight(rows(0)[heads], rows(1)[heads], rows(2)[heads]))
        assert fused.fused_qkv_subparam_sizes(layer(name), whole.shape) == (WIDTH,) * 3
    bias = whole[:, 0]
    for name in ("GLMBlock", "Phi3DecoderLayer"):
        found = torch.cat([part.view(3, -1, SIZE) for part in parts(name, bias, 2)], 1)
        assert torch.equal(found.flatten(), bias)


def test_fewer_heads_of_keys() -> None:
    tp_shard.set_num_kv_heads(2)
    whole = weight(rows(0), rows(1, 2), rows(2, 2))
    for name in ("GLMBlock", "Phi3DecoderLayer"):
        assert fused.fused_qkv_subparam_sizes(layer(name), whole.shape) == (WIDTH, 2 * SIZE, 2 * SIZE)
        for rank, part in enumerate(parts(name, whole, 2)):
            own = slice(4 * rank, 4 * rank + 4)
            assert torch.equal(part, weight(rows(0)[own], rows(1)[rank : rank + 1], rows(2)[rank : rank + 1]))


def test_one_head_of_keys_for_everybody() -> None:
    whole = weight(rows(0), rows(1, 1), rows(2, 1))
    for rank, part in enumerate(parts("GPTBigCodeBlock", whole, 2)):
        assert torch.equal(part, weight(rows(0)[4 * rank : 4 * rank + 4], rows(1, 1), rows(2, 1)))
    assert fused.fused_qkv_subparam_sizes(layer("GPTBigCodeBlock"), whole.shape) is None


def test_four_blocks_each_with_three_matrices() -> None:
    """Of 8 heads, two to a block; each rank has four blocks of one head."""
    blocks = [[rows(matrix)[2 * block : 2 * block + 2] for matrix in (0, 2, 1)] for block in range(4)]
    whole = weight(*(part for block in blocks for part in block))
    for rank, part in enumerate(parts("CodeGenBlock", whole, 2)):
        heads = range(4 * rank, 4 * rank + 4)
        assert torch.equal(part, weight(*(rows(matrix)[head] for head in heads for matrix in (0, 2, 1))))
    with pytest.raises(ValueError, match="num_kv_heads=8 cannot be cut for 3 ranks"):
        parts("CodeGenBlock", whole, 3)


def test_values_of_two_halves() -> None:
    """Rank 0 of two has the heads 0 and 1 of each half, with their columns behind attention."""
    values, bias = weight(rows(2)), torch.randn(WIDTH)
    for rank in (0, 1):
        own = [2 * rank, 2 * rank + 1, 2 * rank + 4, 2 * rank + 5]
        channels = torch.tensor([head * SIZE + i for head in own for i in range(SIZE)])
        part, its_bias = fused.shard_value_with_share_qk(values, bias, rank, 2)
        assert torch.equal(part, values[channels]) and torch.equal(its_bias, bias[channels])
        part, its_bias = fused.shard_value_with_share_qk(values.T, bias, rank, 2, shard_value=False)
        assert torch.equal(part, values.T[:, channels]) and torch.equal(its_bias, bias / 2)
        assert fused.shard_value_with_share_qk(values, None, rank, 2)[1] is None
    with pytest.raises(ValueError, match="8 heads of values in two halves cannot be cut for 8 ranks"):
        fused.shard_value_with_share_qk(values, None, 0, 8)


def test_names_and_states() -> None:
    assert fused.require_tp_fused_qkvw("h.0.attn.c_attn", 2) and not fused.require_tp_fused_qkvw("c_attn", 1)
    assert not fused.require_tp_fused_qkvw("q_proj", 2)
    assert fused.get_fused_qkv_type(nn.Sequential(layer("FalconDecoderLayer"))) == "bloomtype"
    assert fused.get_fused_qkv_type(nn.Linear(1, 1)) is None
    assert fused.prepare_tp_fused_qkvw(layer("GLMBlock"), None, 2, 0) is None
    both = fused.split_by_qkvlist_and_refuse([torch.arange(4), 10 + torch.arange(4)], [1, 3])
    assert [each.tolist() for each in both] == [[0, 10], [1, 2, 3, 11, 12, 13]]
    block = layer("QWenBlock")
    block.attn = nn.Module()
    fused.set_fused_qkv_shard_state(block, [[5, 4], [5, 4], [5, 4]], 1)
    assert block.attn.split_size == 4
    with pytest.raises(ValueError, match="would have no queries"):
        fused.set_fused_qkv_shard_state(block, [[5, 0]] * 3, 1)
    tp_shard.set_n_embd(None)
    with pytest.raises(ValueError, match="call tp_shard.set_n_embd first"):
        parts("GPTBigCodeBlock", weight(rows(0)), 2)
