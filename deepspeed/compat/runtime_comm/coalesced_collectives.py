"""Documented collectives on lists of tensors: the sums of gradients of ZeRO, for code that takes them itself.

Each tensor is cut into as many parts as there are ranks, ``ceil(numel / ranks)`` elements each; the last ones may be
shorter or empty. Every rank gets its part of the average, flat, and the inputs stay as they are.
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
    """This rank's part of the average of each tensor over the ranks of ``group`` (default: all), in one collective per
    dtype and device."""
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
    # One row per rank, so that what a rank gets is contiguous.
    packed = tensors[0].new_zeros(ranks.size, sum(chunks))
    start = 0
    for tensor, chunk in zip(tensors, chunks, strict=True):
        flat, columns = tensor.reshape(-1), slice(start, start + chunk)
        full = (
            flat.numel() // chunk if chunk else 0
        )  # ranks whose part is a whole chunk; the next one gets the rest
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
    """This rank's part of the average of each tensor over all ranks; between ranks it travels in 4 bits per element
    (ZeRO++'s qgZ). Vectors, and tensors whose elements do not divide evenly, are summed as they are.

    ``groups``: the process groups of ``deepspeed.comm.documented_groups._get_local_all_to_all_group()``; sums are
    taken within this rank's ``local_`` group first, without loss. Without such groups all ranks exchange payloads
    directly.
    """
    return [_quantized(tensor, _levels(groups)) for tensor in tensors]


def _levels(groups: Mapping[str, Any]) -> tuple[Communicator | None, Communicator]:
    """(ranks that sum without loss, ranks that exchange payloads) of this rank."""
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
        # Slice g * near.size + i belongs to place i of group g: each place first sums the slices of its place.
        by_place = parts.view(across.size, near.size, numel).transpose(0, 1).reshape(-1)
        parts = torch.empty(across.size * numel, dtype=torch.float32, device=tensor.device)
        near.reduce_scatter(parts, by_place).wait()
    total = _exchange(parts.view(across.size, numel), across)
    return total.div_(everyone.size).to(tensor.dtype)


def _exchange(parts: Tensor, ranks: Communicator) -> Tensor:
    """fp32 sum over the ranks of this rank's row of ``parts`` [ranks, n]."""
    sent = _CODEC.encode(parts)
    received = torch.empty_like(sent)
    ranks.all_to_all(received.view(-1), sent.view(-1)).wait()
    total = torch.zeros(parts.shape[-1], dtype=torch.float32, device=parts.device)
    for payload in received:
        total.add_(_CODEC.decode(payload, parts.shape[-1]))
    return total
