"""How wide each tensor-parallel rank's part is, for scripts that cut weights themselves.

The numbers of the model are set once and hold for the process, as documented. Layers of engines carry their own
``Cut`` and read none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed import comm as dist
from deepspeed.comm.collectives import communicator

__all__ = [
    "get_n_embd",
    "get_num_attention_heads",
    "get_num_kv_heads",
    "get_shard_size",
    "get_shard_size_list",
    "set_n_embd",
    "set_num_attention_heads",
    "set_num_kv_heads",
    "set_tp_grain_size",
]

_HEADS = ("lm_head", "embed_out")
"""Layers of the vocabulary, which do not consist of attention heads."""


@dataclass
class _Numbers:
    kv_heads: int | None = None
    attention_heads: int | None = None
    n_embd: int | None = None
    grain: int = 1


_numbers = _Numbers()


def set_num_kv_heads(num: int | None) -> None:
    _numbers.kv_heads = num


def set_num_attention_heads(num: int | None) -> None:
    _numbers.attention_heads = num


def set_n_embd(num: int | None) -> None:
    _numbers.n_embd = num


def set_tp_grain_size(num: int) -> None:
    """Parts are multiples of this where no heads say how wide they are."""
    if num < 1:
        raise ValueError(f"tp_grain_size={num}: must be at least 1")
    _numbers.grain = num


def get_num_kv_heads() -> int | None:
    return _numbers.kv_heads


def get_num_attention_heads() -> int | None:
    return _numbers.attention_heads


def get_n_embd() -> int | None:
    return _numbers.n_embd


def get_shard_size(
    total_size: int,
    mp_size: int,
    name: str | None = None,
    rank: int | None = None,
    mp_group: Any = None,
    num_kv_heads: int | None = None,
) -> int:
    """How much of ``total_size`` one rank has: ``rank``, or this one in ``mp_group``, or in the job.

    Layers that consist of ``num_kv_heads`` groups of attention heads are cut between those; the first ranks have one
    more if there is a rest. Others (of the feed-forward part and the vocabulary, by ``name``) are cut in multiples of
    the grain.
    """
    if rank is None:
        rank = communicator(mp_group).rank if mp_group is not None else dist.get_rank()
    return get_shard_size_list(total_size, mp_size, name, num_kv_heads)[rank]


def get_shard_size_list(
    total_size: int, mp_size: int, name: str | None = None, num_kv_heads: int | None = None
) -> list[int]:
    """``get_shard_size`` of each rank."""
    groups = _numbers.kv_heads if num_kv_heads is None else num_kv_heads
    text = str(name)
    of_heads = "mlp" not in text and not any(head in text for head in _HEADS)
    if groups and of_heads and total_size % groups == 0:
        return _dealt(groups, mp_size, total_size // groups)
    grain = _numbers.grain if total_size >= _numbers.grain and total_size % _numbers.grain == 0 else 1
    return _dealt(total_size // grain, mp_size, grain)


def _dealt(units: int, ranks: int, extent: int) -> list[int]:
    each, rest = divmod(units, ranks)
    return [(each + (rank < rest)) * extent for rank in range(ranks)]
