"""Shard sizes of tensor-parallel ranks, for scripts that cut weights themselves.

The model's numbers are passed with the call, as an ``AutoTPMeta``, or set once per process, as documented. Layers of
engines have their own ``Cut`` and use neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed import comm as dist
from deepspeed.comm.collectives import communicator

_HEADS = ("lm_head", "embed_out")
"""Vocabulary layers, which do not consist of attention heads."""


_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Feed-forward layers, which do not consist of attention heads."""


@dataclass(frozen=True)
class AutoTPMeta:
    """Numbers of one model that determine the cuts of its layers; None: unknown."""

    num_kv_heads: int | None = None
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1


_numbers: dict[str, Any] = {}
"""Those of the process's model, by field of AutoTPMeta."""


def set_num_kv_heads(num: int | None) -> None:
    _numbers["num_kv_heads"] = num


def set_num_attention_heads(num: int | None) -> None:
    """Set the number of query heads, which no cut depends on: their groups are those of the key heads."""
    _numbers["num_attention_heads"] = num


def set_n_embd(num: int | None) -> None:
    _numbers["n_embd"] = num


def set_tp_grain_size(num: int) -> None:
    """Set the multiple of shard sizes for layers without heads."""
    if num < 1:
        raise ValueError(f"tp_grain_size={num}: must be at least 1")
    _numbers["tp_grain_size"] = num


def get_shard_size(
    total_size: int,
    mp_size: int,
    name: AutoTPMeta | str | None = None,
    rank: Any = None,
    mp_group: Any = None,
    num_kv_heads: Any = None,
    *,
    meta: AutoTPMeta | None = None,
) -> int:
    """Return one rank's shard size of ``total_size``: of ``rank``, else of this rank in ``mp_group``, else in the job.

    Layers of ``num_kv_heads`` groups of attention heads are cut between groups; the first ranks get one more if they
    do not divide evenly. Others (feed-forward and vocabulary, by ``name``) are cut in multiples of the grain.
    ``meta``: the model's numbers, instead of the process's; it may also be the third argument, before name, rank and
    mp_group.
    """
    if isinstance(name, AutoTPMeta):
        meta, name, rank, mp_group, num_kv_heads = name, rank, mp_group, num_kv_heads, None
    if rank is None:
        rank = communicator(mp_group).rank if mp_group is not None else dist.get_rank()
    return get_shard_size_list(total_size, mp_size, name, num_kv_heads, meta=meta)[rank]


def get_shard_size_list(
    total_size: int,
    mp_size: int,
    name: AutoTPMeta | str | None = None,
    num_kv_heads: Any = None,
    *,
    meta: AutoTPMeta | None = None,
) -> list[int]:
    """Return ``get_shard_size`` of every rank, in rank order."""
    if isinstance(name, AutoTPMeta):
        meta, name, num_kv_heads = name, num_kv_heads, None
    known = AutoTPMeta(**_numbers) if meta is None else meta
    groups, grain = known.num_kv_heads if num_kv_heads is None else num_kv_heads, known.tp_grain_size
    text = str(name)
    others = ("mlp", *_HEADS) if meta is None else ("mlp", *_HEADS, *_EXPERT_PARTS)
    if groups and total_size % groups == 0 and not any(other in text for other in others):
        return _dealt(groups, mp_size, total_size // groups)
    if total_size < grain or (meta is None and total_size % grain):
        return _dealt(total_size, mp_size, 1)
    sizes = _dealt(total_size // grain, mp_size, grain)
    sizes[-1] += total_size % grain  # other ranks keep whole grains
    return sizes


def _dealt(units: int, ranks: int, extent: int) -> list[int]:
    each, rest = divmod(units, ranks)
    return [(each + (rank < rest)) * extent for rank in range(ranks)]
