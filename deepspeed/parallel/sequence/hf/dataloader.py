"""Sharding of batches of whole sequences."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.sequence.assignment import shard_lengths

IGNORED = -100
"""Label of tokens that are excluded from the loss."""


class UlyssesSPDataLoaderAdapter:
    """Iterates over sequence shards of a data loader's batches.

    Every rank of the group has a loader with different batches. One batch of each yields as many steps as there are
    ranks: this rank's shard of the first rank's batch, of the second's, and so on. Only these shards are communicated.
    Tensors are sharded along the dim of tokens, the second, or the last of ``position_ids``; all else is replicated.
    Shards of one sequence differ by at most one token.

    ``labels`` become ``shift_labels``, the token that each position predicts, since the last one of a shard is in the
    next shard. ``position_ids`` are required: a shard alone does not know where it begins. A loader that ends before
    those of the other ranks contributes no more batches.

    Args:
        dl: a loader of dicts with "input_ids" or "inputs_embeds", [batch, tokens, ...], and "position_ids".
        sp_rank, sp_group, sp_world_size: the sequence-parallel group, this rank in it, and its size.
        device: device of the shards.

    Raises (in iteration):
        ValueError: no position ids; fewer tokens than ranks; a batch that is not a dict.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = torch.device(device)
        self._batches: Iterator[Any] | None = None
        self._shards: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __getattr__(self, name: str) -> Any:
        """Forward any other attribute to the loader: its dataset, samplers, ``set_epoch``."""
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        self._batches = iter(self.dl)
        self._shards.clear()
        return self

    def __next__(self) -> dict[str, Any]:
        if not self._shards:
            self.refill()
        if not self._shards:
            raise StopIteration
        return self._shards.popleft()

    def refill(self) -> None:
        """Fetch and exchange the next batch of every rank's loader. Collective."""
        if self._batches is None:
            self._batches = iter(self.dl)
        batch = next(self._batches, None)
        parts = None if batch is None else _sharded(batch, self.sp_world_size)
        for shard in self._swap(parts):
            self._shards.append({key: _to(value, self.device) for key, value in shard.items()})

    def _swap(self, parts: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Send ``parts[rank]`` to each rank and return the received parts in rank order."""
        if self.sp_world_size == 1:
            return parts or []
        comm = communicator_of(self.sp_group)
        where = torch.device("cpu") if dist.get_backend(self.sp_group) == "gloo" else self.device
        nothing = torch.empty(0, dtype=torch.uint8)
        outgoing = [_packed(part) for part in parts] if parts else [nothing] * self.sp_world_size
        counts = torch.tensor([len(each) for each in outgoing], device=where)
        sizes = torch.empty_like(counts)
        comm.all_to_all(sizes, counts).wait()
        received = sizes.tolist()
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=where)
        comm.all_to_all(incoming, torch.cat(outgoing).to(where), received, counts.tolist()).wait()
        return [_unpacked(run) for run in incoming.cpu().split(received) if len(run)]


def _sharded(batch: Any, ranks: int) -> list[dict[str, Any]]:
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"UlyssesSPDataLoaderAdapter needs batches that are dicts of tensors, got {type(batch).__name__}"
        )
    if batch.get("position_ids") is None:
        raise ValueError(
            "UlyssesSPDataLoaderAdapter: the batch has no 'position_ids', but a shard needs them to know "
            f"its offset in the sequence; let the collator return them (the batch has {', '.join(batch)})"
        )
    return shards_of(with_shifted_labels(dict(batch)), ranks)


def with_shifted_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Replace ``labels`` by ``shift_labels``, unless the batch already has these."""
    labels = batch.pop("labels", None)
    if labels is not None and batch.get("shift_labels") is None:
        batch["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return batch


def shards_of(batch: Mapping[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Split a batch into one shard per rank. ValueError: fewer tokens than ranks."""
    tokens = int(batch["position_ids"].shape[-1])
    lengths = shard_lengths(tokens, ranks)
    result: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, value in batch.items():
        dim = _tokens_dim(key, value, tokens)
        parts = [value] * ranks if dim is None else [part.contiguous() for part in value.split(lengths, dim)]
        for shard, part in zip(result, parts, strict=True):
            shard[key] = part
    return result


def _tokens_dim(key: str, value: Any, tokens: int) -> int | None:
    if not isinstance(value, Tensor) or value.dim() < 1:
        return None
    if key == "position_ids":
        return value.dim() - 1
    return 1 if value.dim() > 1 and value.shape[1] == tokens else None


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _packed(part: dict[str, Any]) -> Tensor:
    """Return the bytes of a shard, uint8."""
    buffer = io.BytesIO()
    # Copied, because a view would be saved with all of its batch's memory.
    torch.save(
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in part.items()}, buffer
    )
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(run: Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(run.numpy().tobytes()), map_location="cpu", weights_only=False)
