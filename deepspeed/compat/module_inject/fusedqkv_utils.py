"""Which part of a fused projection of queries, keys and values each tensor-parallel rank has, by the kind of layer.

For scripts that cut weights themselves: the numbers of the model are those of ``tp_shard``. Layers of engines find
their cuts in the graph of the model and read none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.logging import warning_once
from deepspeed.compat.module_inject import tp_shard
from deepspeed.parallel.tensor.cuts import Cut

__all__ = [
    "FUSED_QKV_TYPE_DICT",
    "fused_qkv_subparam_sizes",
    "get_fused_qkv_type",
    "prepare_tp_fused_qkvw",
    "require_tp_fused_qkvw",
    "set_fused_qkv_shard_state",
    "shard_value_with_share_qk",
    "split_by_qkvlist_and_refuse",
]

FUSED_QKV_TYPE_DICT = {
    **dict.fromkeys(["BloomBlock", "FalconDecoderLayer"], "bloomtype"),
    **dict.fromkeys(["GLMBlock", "MPTBlock", "MptBlock", "BaichuanLayer", "DecoderLayer"], "glmtype"),
    "CodeGenBlock": "codegentype",
    "GPTBigCodeBlock": "bigcodetype",
    "Phi3DecoderLayer": "phi3type",
    "QWenBlock": "qwentype",
}
"""A class of layers -> how its projection is arranged."""

_FUSED_NAMES = ("qkv_proj", "query_key_value", "attn.Wqkv", "self_attn.W_pack", "c_attn")
_CODEGEN_BLOCKS = 4
"""Equal runs of heads, each with its queries, values and keys: models of CodeGen were trained in so many parts."""


def split_by_qkvlist_and_refuse(
    qkv_list: Sequence[Tensor], split_size: int | list[int], split_dim: int = 0, cat_dim: int = 0
) -> list[Tensor]:
    """Each tensor split, and the i-th pieces of all of them joined."""
    pieces = zip(*(each.split(split_size, split_dim) for each in qkv_list), strict=True)
    return [torch.cat(piece, cat_dim) for piece in pieces]


def require_tp_fused_qkvw(name: str, mp_size: int) -> bool:
    """Whether a weight of this name is a fused projection that ``mp_size`` ranks share."""
    return mp_size > 1 and any(each in name for each in _FUSED_NAMES)


def get_fused_qkv_type(module: nn.Module) -> str | None:
    """How the fused projections in ``module`` are arranged, by the longest known class name in its description."""
    text = str(module)
    known = [name for name in FUSED_QKV_TYPE_DICT if name in text]
    return FUSED_QKV_TYPE_DICT[max(known, key=len)] if known else None


def fused_qkv_subparam_sizes(module: nn.Module, weight_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The rows of the matrices that are cut each for itself; None where ranks hold something else than such parts."""
    kind = get_fused_qkv_type(module) or "bloomtype"
    if kind in ("codegentype", "bigcodetype"):
        return None
    return _matrices(kind, weight_shape)


def set_fused_qkv_shard_state(module: Any, shard_widths: Sequence[Sequence[int]], tp_index: int) -> None:
    """Tell a layer of QWen, which splits what its projection gives by ``attn.split_size``, how wide its part is.

    ``shard_widths[matrix][rank]``. ValueError: the rank has no queries.
    """
    if get_fused_qkv_type(module) != "qwentype":
        return
    width = shard_widths[0][tp_index]
    if width == 0:
        raise ValueError(
            f"rank {tp_index} of {len(shard_widths[0])} would have no queries of this QWen layer: use fewer ranks"
        )
    module.attn.split_size = width


def prepare_tp_fused_qkvw(
    module: nn.Module, src: Tensor | None, mp_size: int, gpu_index: int
) -> Tensor | None:
    """The rows of a fused weight (or elements of a bias) that rank ``gpu_index`` of ``mp_size`` has. None stays None.

    ValueError: the numbers of ``tp_shard`` that the arrangement needs are missing or do not fit.
    """
    if src is None:
        return None
    kind = get_fused_qkv_type(module)
    if kind is None:
        warning_once(
            f"{type(module).__name__} is no layer whose fused projection is known: it is cut as one matrix of heads, "
            "each with its query, key and value"
        )
    return _CUTS.get(kind or "bloomtype", _side_by_side)(kind or "bloomtype", src, mp_size).take(
        src, gpu_index
    )


def _number(found: int | None, setter: str) -> int:
    if found is None:
        raise ValueError(f"this fused projection needs a number of the model: call tp_shard.{setter} first")
    return found


def _matrices(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Rows of the matrices side by side."""
    rows = shape[0]
    if kind == "bloomtype":
        return (rows,)
    if kind == "phi3type":
        heads = _number(tp_shard.get_num_attention_heads(), "set_num_attention_heads")
        inputs = shape[1] if len(shape) > 1 else _number(tp_shard.get_n_embd(), "set_n_embd")
        width = inputs // heads
        keys = width * _number(tp_shard.get_num_kv_heads(), "set_num_kv_heads")
        return (rows - 2 * keys, keys, keys)
    if tp_shard.get_num_kv_heads() == 2:  # of ChatGLM: few keys for many queries
        width = _number(tp_shard.get_n_embd(), "set_n_embd")
        return (width, *[(rows - width) // 2] * 2)
    return (rows // 3,) * 3


def _side_by_side(kind: str, src: Tensor, ranks: int) -> Cut:
    return Cut.fused(0, [tp_shard.get_shard_size_list(rows, ranks) for rows in _matrices(kind, src.shape)])


def _with_all_keys(kind: str, src: Tensor, ranks: int) -> Cut:
    """Queries are cut; the one head of keys and values is everybody's."""
    queries, rows = _number(tp_shard.get_n_embd(), "set_n_embd"), src.shape[0]
    own = Cut.of_sizes(0, tp_shard.get_shard_size_list(queries, ranks))
    return Cut(0, rows, tuple((*parts, (queries, rows)) for parts in own.parts))


def _in_four_blocks(kind: str, src: Tensor, ranks: int) -> Cut:
    """A part consists of four blocks again: each is a run of heads of one block of the whole."""
    heads, rows = _number(tp_shard.get_num_kv_heads(), "set_num_kv_heads"), src.shape[0]
    if heads % (ranks * _CODEGEN_BLOCKS) or rows % (3 * ranks * _CODEGEN_BLOCKS):
        raise ValueError(
            f"a layer of CodeGen with num_kv_heads={heads} cannot be cut for {ranks} ranks: heads come in blocks of "
            f"{_CODEGEN_BLOCKS} times the number of ranks"
        )
    run, third = rows // (3 * ranks * _CODEGEN_BLOCKS), rows // (3 * _CODEGEN_BLOCKS)
    parts = []
    for rank in range(ranks):
        own = []
        for number in range(rank * _CODEGEN_BLOCKS, (rank + 1) * _CODEGEN_BLOCKS):
            block, place = divmod(number, ranks)
            starts = (3 * block * third + matrix * third + place * run for matrix in range(3))
            own += [(start, start + run) for start in starts]
        parts.append(tuple(own))
    return Cut(0, rows, tuple(parts))


_CUTS: dict[str, Callable[[str, Tensor, int], Cut]] = {
    "bigcodetype": _with_all_keys,
    "codegentype": _in_four_blocks,
}


def shard_value_with_share_qk(
    weight: Tensor, bias: Tensor | None, rank: int, world_size: int, shard_value: bool = True
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A rank's part of the values, or of the projection behind attention (``shard_value=False``), where heads of the
    first half of the values belong to those of the second half.

    A bias of values is cut alike; one of the projection is divided by the number of ranks, whose results are summed.
    ValueError: the heads do not divide.
    """
    heads = _number(tp_shard.get_num_kv_heads(), "set_num_kv_heads")
    if heads % world_size or world_size > heads // 2:
        raise ValueError(f"{heads} heads of values in two halves cannot be cut for {world_size} ranks")
    dim = 0 if shard_value else 1
    size, first = weight.shape[dim] // heads, rank * (heads // world_size)
    half = [(first + offset) // 2 for offset in range(0, heads // world_size, 2)]
    own = torch.tensor([*half, *(head + heads // 2 for head in half)], device=weight.device)
    channels = (own[:, None] * size + torch.arange(size, device=weight.device)).flatten()
    part = nn.Parameter(weight.detach().index_select(dim, channels))
    if bias is None:
        return part, None
    return part, nn.Parameter(bias.detach()[channels] if shard_value else bias.detach() / world_size)
