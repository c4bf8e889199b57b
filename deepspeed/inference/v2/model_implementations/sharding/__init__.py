"""Which part of each weight of a decoder a rank holds. Weights are [.., outputs, inputs]; all functions are pure.

Extents are multiples of a grain (a head, or 32 channels), the first ranks have one grain more if there is a rest. Of
grouped attention each rank has whole groups, or several ranks share one: then each has all its keys and values.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

__all__ = [
    "DEFAULT_SHARD_GRANULARITY",
    "ShardingType",
    "attn_out_in_features",
    "get_local_heads",
    "get_shard_endpoints",
    "qkv_out_features",
    "shard_attn_out_param",
    "shard_embedding_param",
    "shard_mlp_1_param",
    "shard_mlp_2_param",
    "shard_param",
    "shard_qkv_param",
    "shard_unembed_param",
    "sharded_embedding_dim",
    "sharded_intermediate_dim",
    "sharded_unembed_dim",
]

DEFAULT_SHARD_GRANULARITY = 32


class ShardingType(Enum):
    """The dim that is cut: outputs (OUTER) or inputs (INNER)."""

    OUTER_DIMENSION = 0
    INNER_DIMENSION = 1


def get_shard_endpoints(
    dim_size: int, shard_rank: int, num_shards: int, granularity: int = DEFAULT_SHARD_GRANULARITY
) -> tuple[int, int]:
    """The half-open interval of one rank. AssertionError: the grain does not divide ``dim_size``."""
    assert dim_size % granularity == 0, f"{dim_size} is not a multiple of {granularity}"
    each, rest = divmod(dim_size // granularity, num_shards)
    start = shard_rank * each + min(shard_rank, rest)
    return start * granularity, (start + each + (shard_rank < rest)) * granularity


def shard_param(
    param: Tensor | None,
    shard_mode: ShardingType,
    shard_rank: int,
    num_shards: int,
    num_concatenated_matrices: int = 1,
    granularity: int = DEFAULT_SHARD_GRANULARITY,
    bias_dims: int = 1,
) -> Tensor | None:
    """A rank's part of a weight, or of a bias (which has ``bias_dims`` dims); None for None.

    ``num_concatenated_matrices``: so many lie side by side, each of which is cut.
    """
    assert shard_rank < num_shards, f"there is no rank {shard_rank} among {num_shards}"
    if param is None or num_shards == 1:
        return param
    outputs = shard_mode is ShardingType.OUTER_DIMENSION
    dim = -2 if outputs and param.dim() != bias_dims else -1
    low, high = get_shard_endpoints(
        param.shape[dim] // num_concatenated_matrices, shard_rank, num_shards, granularity
    )
    blocks = param.chunk(num_concatenated_matrices, dim)
    parts = [block.narrow(dim, low, high - low) for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# --------------------------------------------------------------------------------------------------- attention


def _heads(rank: int, ranks: int, q: int, kv: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The intervals of query heads, and of heads of keys and values. ValueError: they cannot be dealt."""
    if q < ranks:
        raise ValueError(f"{q} query heads are too few for {ranks} ranks")
    if kv == q:
        own = get_shard_endpoints(q, rank, ranks, 1)
        return own, own
    if q % kv:
        raise ValueError(f"{q} query heads are no multiple of {kv} heads of keys and values")
    group = q // kv
    if kv >= ranks:
        if kv % ranks:
            raise ValueError(f"{kv} heads of keys and values cannot be dealt evenly to {ranks} ranks")
        low, high = get_shard_endpoints(kv, rank, ranks, 1)
        return (low * group, high * group), (low, high)
    if ranks % kv:
        raise ValueError(f"{ranks} ranks cannot share {kv} heads of keys and values evenly")
    sharing = ranks // kv
    head = rank // sharing
    low, high = get_shard_endpoints(group, rank % sharing, sharing, 1)
    return (head * group + low, head * group + high), (head, head + 1)


def _counts(n_heads_q: int | None, n_heads_kv: int | None, default: int) -> tuple[int, int]:
    if n_heads_q is None and n_heads_kv is not None:
        raise ValueError("n_heads_kv is given without n_heads_q")
    q = default if n_heads_q is None else n_heads_q
    return q, q if n_heads_kv is None else n_heads_kv


def get_local_heads(
    shard_rank: int, num_shards: int, n_heads_q: int, n_heads_kv: int | None = None
) -> tuple[int, int]:
    """How many heads a rank has: of queries, and of keys and values."""
    q, kv = _heads(shard_rank, num_shards, n_heads_q, n_heads_q if n_heads_kv is None else n_heads_kv)
    return q[1] - q[0], kv[1] - kv[0]


def shard_qkv_param(
    param: Tensor | None,
    shard_rank: int,
    num_shards: int,
    head_size: int,
    n_heads_q: int | None = None,
    n_heads_kv: int | None = None,
) -> Tensor:
    """A rank's part of the fused projection: all queries, then all keys, then all values. Without numbers of heads the
    three are equally wide."""
    if param is None:
        raise ValueError("shard_qkv_param: the parameter is None")
    if n_heads_q is None and param.shape[0] % (3 * head_size):
        raise ValueError(f"{param.shape[0]} rows are not three times whole heads of {head_size}")
    q_heads, kv_heads = _counts(n_heads_q, n_heads_kv, param.shape[0] // (3 * head_size))
    if param.shape[0] != head_size * (q_heads + 2 * kv_heads):
        raise ValueError(
            f"{param.shape[0]} rows are not {q_heads} + 2 x {kv_heads} heads of {head_size} rows"
        )
    q, kv = _heads(shard_rank, num_shards, q_heads, kv_heads)
    starts = (q[0], q_heads + kv[0], q_heads + kv_heads + kv[0])
    lengths = (q[1] - q[0], kv[1] - kv[0], kv[1] - kv[0])
    parts = [param.narrow(0, s * head_size, n * head_size) for s, n in zip(starts, lengths, strict=True)]
    return torch.cat(parts, 0)


def qkv_out_features(
    in_features: int,
    shard_rank: int,
    num_shards: int,
    head_size: int,
    n_heads_q: int | None = None,
    n_heads_kv: int | None = None,
) -> int:
    """Rows of a rank's part of the fused projection of a model that is ``in_features`` wide."""
    q_heads, kv_heads = _counts(n_heads_q, n_heads_kv, in_features // head_size)
    if in_features != head_size * q_heads:
        raise ValueError(f"in_features={in_features} are not {q_heads} heads of {head_size}")
    q, kv = get_local_heads(shard_rank, num_shards, q_heads, kv_heads)
    return (q + 2 * kv) * head_size


def shard_attn_out_param(
    param: Tensor,
    shard_rank: int,
    num_shards: int,
    head_size: int,
    n_heads_q: int | None = None,
    n_heads_kv: int | None = None,
) -> Tensor | None:
    """A rank's columns of the projection behind the attention. The bias is added once: the first rank has it, None on
    the others."""
    if param.dim() == 1:
        return param if shard_rank == 0 else None
    assert n_heads_kv is None or n_heads_q is not None, "n_heads_kv is given without n_heads_q"
    q_heads, kv_heads = _counts(n_heads_q, n_heads_kv, param.shape[-1] // head_size)
    assert param.shape[-1] == head_size * q_heads, (
        f"{param.shape[-1]} columns are not {q_heads} heads of {head_size}"
    )
    q, _ = _heads(shard_rank, num_shards, q_heads, kv_heads)
    return param.narrow(-1, q[0] * head_size, (q[1] - q[0]) * head_size)


def attn_out_in_features(
    out_features: int,
    shard_rank: int,
    num_shards: int,
    head_size: int,
    n_heads_q: int | None = None,
    n_heads_kv: int | None = None,
) -> int:
    """Columns of a rank's part of the projection behind the attention."""
    assert n_heads_kv is None or n_heads_q is not None, "n_heads_kv is given without n_heads_q"
    q_heads, kv_heads = _counts(n_heads_q, n_heads_kv, out_features // head_size)
    return get_local_heads(shard_rank, num_shards, q_heads, kv_heads)[0] * head_size


# ------------------------------------------------------------------------------- feed-forward part and vocabulary


def shard_mlp_1_param(
    param: Tensor, shard_rank: int, num_shards: int, gated: bool = False, is_moe: bool = False
) -> Tensor | None:
    """Rows of the layer that goes in; with ``is_moe`` of all experts. ``gated``: rows come in pairs, gate and value."""
    return shard_param(
        param,
        ShardingType.OUTER_DIMENSION,
        shard_rank,
        num_shards,
        granularity=DEFAULT_SHARD_GRANULARITY * (2 if gated else 1),
        bias_dims=2 if is_moe else 1,
    )


def shard_mlp_2_param(param: Tensor, shard_rank: int, num_shards: int, is_moe: bool = False) -> Tensor | None:
    """Columns of the layer that comes out; the bias is the first rank's, None on the others."""
    if param.dim() == (2 if is_moe else 1):
        return param if shard_rank == 0 else None
    return shard_param(param, ShardingType.INNER_DIMENSION, shard_rank, num_shards)


def _extent(size: int, rank: int, ranks: int, grain: int = DEFAULT_SHARD_GRANULARITY) -> int:
    low, high = get_shard_endpoints(size, rank, ranks, grain)
    return high - low


def sharded_intermediate_dim(intermediate_size: int, num_shards: int, shard_rank: int) -> int:
    """A rank's width between the two layers."""
    return _extent(intermediate_size, shard_rank, num_shards)


def shard_embedding_param(param: Tensor, shard_rank: int, num_shards: int) -> Tensor | None:
    """Columns of a table [vocabulary, width]."""
    return shard_param(param, ShardingType.INNER_DIMENSION, shard_rank, num_shards)


def sharded_embedding_dim(embedding_size: int, shard_rank: int, num_shards: int) -> int:
    return _extent(embedding_size, shard_rank, num_shards)


def shard_unembed_param(param: Tensor, shard_rank: int, num_shards: int) -> Tensor | None:
    """Rows of the head [vocabulary, width]."""
    return shard_param(param, ShardingType.OUTER_DIMENSION, shard_rank, num_shards, granularity=1)


def sharded_unembed_dim(vocab_size: int, shard_rank: int, num_shards: int) -> int:
    return _extent(vocab_size, shard_rank, num_shards, 1)
