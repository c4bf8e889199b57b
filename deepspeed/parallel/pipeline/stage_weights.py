"""Streaming of all stages' weights to rank 0, one tensor at a time, for an export of the whole model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.checkpoint.files.archive_writer import LazyTensor

_Description = tuple[str, tuple[int, ...], torch.dtype]


class StageWeights(Protocol):
    """Weights of one stage as ``engine/weights.py`` gathers them, in the same order on all ranks of the stage."""

    aliases: dict[str, str]

    def tensors(self) -> Mapping[str, LazyTensor]: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: object) -> None: ...


class AllStageWeights:
    """``StageWeights`` of all stages: tensors of other stages are received on access. Of weights tied across stages,
    those of the first stage are used.

    Args:
        own: weights of this rank's stage.
        ranks: the global rank of each stage of this pipeline. In rank 0's pipeline, all send to rank 0.
        group: the process group of these ranks.
        device: device of the messages.
    """

    def __init__(
        self, own: StageWeights, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._own, self._ranks, self._group, self._device = own, ranks, group, device
        lazy = own.tensors()
        described = [(name, tensor.shape, tensor.dtype) for name, tensor in lazy.items()]
        everyone: list[Any] = [None] * len(ranks)
        dist.all_gather_object(everyone, (described, own.aliases), group=group)
        stage = list(ranks).index(dist.get_rank())
        self._to_receive: deque[tuple[int, _Description]] = deque()
        self._to_send: list[tuple[bool, LazyTensor]] = []
        self.aliases: dict[str, str] = {}
        seen = {name for name, *_ in everyone[0][0]}
        for number, (rank, (descriptions, aliases)) in enumerate(zip(ranks, everyone, strict=True)):
            self.aliases.update({alias: name for alias, name in aliases.items() if alias not in self.aliases})
            if number == 0:
                continue
            for each in descriptions:
                new = each[0] not in seen
                seen.add(each[0])
                if number == stage:
                    self._to_send.append((new, lazy[each[0]]))
                elif new:
                    self._to_receive.append((rank, each))
        if ranks[0] != 0:
            self._to_send = []  # another replica or tensor-parallel part: rank 0 receives from its own pipeline only
        if dist.get_rank() != 0:
            self._to_receive.clear()
        self._lazy = lazy

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors by name; they must be accessed in this order."""
        others = {
            each[0]: LazyTensor(each[1], each[2], partial(self._received, each[0]))
            for _, each in self._to_receive
        }
        return {**self._lazy, **others}

    def _received(self, name: str) -> Iterator[Tensor]:
        assert self._to_receive[0][1][0] == name, "tensors must be requested in order"
        yield self._receive()

    def _receive(self) -> Tensor:
        rank, (_, shape, dtype) = self._to_receive.popleft()
        data = torch.empty(shape, dtype=dtype, device=self._device)
        if data.numel():
            dist.recv(data, rank, group=self._group)
        return data

    def __enter__(self) -> AllStageWeights:
        self._own.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Send this stage's tensors; on rank 0, receive and drop any that are left after an error."""
        try:
            for wanted, tensor in self._to_send:
                for part in tensor.parts():
                    if wanted and part.numel():
                        dist.send(part.detach().to(self._device).contiguous(), 0, group=self._group)
        finally:
            self._own.__exit__(*exc)
        while self._to_receive:
            self._receive()
