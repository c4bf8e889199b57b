"""Documented collectives on lists of tensors: ZeRO's gradient sums, for code that calls them itself.

Each tensor is cut into one shard per rank, of ``ceil(numel / ranks)`` elements; the last ones may be shorter or
empty. Every rank gets its flat shard of the average; inputs are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from deepspeed.base.logging import logger
from deepspeed.comm.collectives import Communicator, communicator
from deepspeed.ops.formats.codecs import BlockCodec

_CODEC = BlockCodec(4)


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Return this rank's shard of the average of each tensor over ``group`` (default: all ranks), with one collective
    per dtype and device."""
    ranks = communicator(group if group is not None else torch.distributed.group.WORLD)
    outputs: list[Tensor | None] = [None] * len(tensors)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in kinds.values():
        averages = _averages([tensors[i] for i in indices], ranks)
        for index, average in zip(indices, averages, strict=True):
            outputs[index] = average
    return [output for output in outputs if output is not None]


def _averages(tensors: Sequence[Tensor], ranks: Communicator) -> list[Tensor]:
    chunks = [-(-tensor.numel() // ranks.size) for tensor in tensors]
    # One row per rank, so that each rank's shards are contiguous.
    packed = tensors[0].new_zeros(ranks.size, sum(chunks))
    start = 0
    for tensor, chunk in zip(tensors, chunks, strict=True):
        flat, columns = tensor.reshape(-1), slice(start, start + chunk)
        full = flat.numel() // chunk if chunk else 0  # ranks with a whole chunk; the next one gets the rest
        packed[:full, columns] = flat[: full * chunk].view(full, chunk)
        rest = flat[full * chunk :]
        if rest.numel():
            packed[full, start : start + rest.numel()] = rest
        start += chunk
    own = packed.new_empty(sum(chunks))
    ranks.reduce_scatter(own, packed.view(-1), scale=1.0 / ranks.size).wait()
    lengths = [
        max(0, min(chunk, tensor.numel() - ranks.rank * chunk))
        for tensor, chunk in zip(tensors, chunks, strict=True)
    ]
    return [part[:length] for part, length in zip(own.split(chunks), lengths, strict=True)]


@torch.no_grad()
def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """Return this rank's shard of the average of each tensor over all ranks, sent with 4 bits per element (ZeRO++'s
    qgZ). Vectors, and tensors that do not divide evenly, are summed unquantized.

    ``groups``: the process groups of ``deepspeed.comm.documented_groups._get_local_all_to_all_group()``; the sum
    within this rank's ``local_`` group comes first, unquantized. Without such groups all ranks exchange quantized
    payloads directly.
    """
    return [_quantized(tensor, _levels(groups)) for tensor in tensors]


def _levels(groups: Mapping[str, Any]) -> tuple[Communicator | None, Communicator]:
    """Return this rank's (group of unquantized sums or None, group that exchanges payloads)."""
    near, across = (_own_group(groups, kind) for kind in ("local_", "global_"))
    everyone = communicator(torch.distributed.group.WORLD)
    if near is None or across is None or near.size * across.size != everyone.size:
        return None, everyone
    return near, across


def _own_group(groups: Mapping[str, Any], kind: str) -> Communicator | None:
    rank = torch.distributed.get_rank()
    for name, group in groups.items():
        if not name.startswith(kind) or group in (None, torch.distributed.GroupMember.NON_GROUP_MEMBER):
            continue
        if rank in torch.distributed.get_process_group_ranks(group):
            return communicator(group)
    return None


def _quantized(tensor: Tensor, levels: tuple[Communicator | None, Communicator]) -> Tensor:
    everyone = communicator(torch.distributed.group.WORLD)
    if tensor.dim() == 1 or tensor.numel() % (2 * everyone.size):
        if tensor.dim() != 1:
            logger.debug(
                f"{tensor.numel()} elements are not a multiple of 2 x {everyone.size}: summed unquantized"
            )
        return reduce_scatter_coalesced([tensor])[0]
    near, across = levels
    numel = tensor.numel() // everyone.size
    parts = tensor.reshape(-1)
    if near is not None:
        # Slice g * near.size + i is for rank i of group g. Within a group, rank i first sums the slices for all ranks
        # i.
        by_place = parts.view(across.size, near.size, numel).transpose(0, 1).reshape(-1)
        parts = torch.empty(across.size * numel, dtype=torch.float32, device=tensor.device)
        near.reduce_scatter(parts, by_place).wait()
    total = _exchange(parts.view(across.size, numel), across)
    return total.div_(everyone.size).to(tensor.dtype)


def _exchange(parts: Tensor, ranks: Communicator) -> Tensor:
    """Return the fp32 sum over ranks of this rank's row of ``parts`` [ranks, n], exchanged quantized."""
    sent = _CODEC.encode(parts)
    received = torch.empty_like(sent)
    ranks.all_to_all(received.view(-1), sent.view(-1)).wait()
    total = torch.zeros(parts.shape[-1], dtype=torch.float32, device=parts.device)
    for payload in received:
        total.add_(_CODEC.decode(payload, parts.shape[-1]))
    return total
