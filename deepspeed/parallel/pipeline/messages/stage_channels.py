"""Channels of a stage: one in each direction for every pair of adjacent pieces (chunks) of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.comm.groups import new_group
from deepspeed.comm.transports.host_messages import Edge, NeighbourReceiver, NeighbourSender, connect
from deepspeed.parallel.pipeline.messages.channels import (
    LocalReceiver,
    LocalSender,
    ReceiveChannel,
    Receiver,
    SameStageChannel,
    SendChannel,
    Sender,
)
from deepspeed.parallel.pipeline.order_executor import ChunkChannels
from deepspeed.parallel.pipeline.schedules.choice import ScheduleLayout
from deepspeed.parallel.pipeline.schedules.orders import chunk_position, stage_of_position

_ACTIVATIONS, _GRADIENTS = 1, 2  # tags between pieces 0 and 1; each later pair adds 2


@dataclass(eq=False)
class StageChannels:
    """Creates the ``channels`` of each chunk of stage ``stage``. ``ranks``: the global rank of each stage of this
    pipeline. Collective over ``group``, these ranks."""

    layout: ScheduleLayout
    stage: int
    ranks: list[int]
    group: ProcessGroup
    device: torch.device
    may_share_memory: InitVar[bool]

    def __post_init__(self, may_share_memory: bool) -> None:
        self._same_stage: dict[Hashable, SameStageChannel] = {}
        self._local: Mapping[Hashable, NeighbourSender | NeighbourReceiver] = {}
        if self.layout.stages > 1 and self.device.type == "cpu":
            self._local = connect(self.group, self._edges(), may_share_memory=may_share_memory)
        self._groups = {} if self.device.type == "cpu" else self._groups_of_edges()
        self.channels = [self._of_chunk(chunk) for chunk in range(self.layout.chunks)]

    def _edges(self) -> list[Edge]:
        """Return the edges between different stages, keyed by tag."""
        found = []
        for number in range(self.layout.stages * self.layout.chunks - 1):
            before, after = self._rank_of(number), self._rank_of(number + 1)
            if before != after:
                found.append(Edge(2 * number + _ACTIVATIONS, before, after))
                found.append(Edge(2 * number + _GRADIENTS, after, before))
        return found

    def _groups_of_edges(self) -> dict[Hashable, ProcessGroup]:
        """Create a group for each direction of this stage's channels, by tag: NCCL has no tags and queues all transfers
        between two ranks of a group in order, so two ranks that both send first would deadlock."""
        own = self.ranks[self.stage]
        return {
            edge.key: new_group(sorted((edge.source, edge.target)), separate=True)
            for edge in self._edges()
            if own in (edge.source, edge.target)
        }

    def _rank_of(self, number: int) -> int:
        """Return the rank that holds a piece of the model."""
        return self.ranks[stage_of_position(number, self.layout.stages, self.layout.zigzag)]

    def _of_chunk(self, chunk: int) -> ChunkChannels:
        layout = self.layout
        number = chunk_position(chunk, self.stage, layout.stages, layout.zigzag)
        channels = ChunkChannels()
        if number > 0:
            tag = 2 * (number - 1)
            channels.inputs = self._end(number - 1, tag + _ACTIVATIONS, LocalReceiver, Receiver)
            channels.input_gradients = self._end(number - 1, tag + _GRADIENTS, LocalSender, Sender)
        if number < layout.stages * layout.chunks - 1:
            tag = 2 * number
            channels.outputs = self._end(number + 1, tag + _ACTIVATIONS, LocalSender, Sender)
            channels.output_gradients = self._end(number + 1, tag + _GRADIENTS, LocalReceiver, Receiver)
        return channels

    def _end(self, piece: int, tag: int, local: type[Any], remote: type[Any]) -> Any:
        """Return this stage's end of a channel from or to ``piece``; its class, unless that is on this stage too, is
        ``local`` on one host that shares memory, else ``remote``."""
        peer, end = self._rank_of(piece), self._local.get(tag)
        if peer == self.ranks[self.stage]:
            return self._same_stage.setdefault(tag, SameStageChannel())
        return (
            remote(peer, self._groups.get(tag, self.group), self.device, tag) if end is None else local(end)
        )

    def named(self) -> Iterator[tuple[str, ReceiveChannel | SendChannel]]:
        """Yield each channel to or from a neighbour, with the name of its payload."""
        for channels in self.channels:
            for name, channel in (
                ("activations", channels.inputs),
                ("gradients of activations", channels.output_gradients),
                ("activations", channels.outputs),
                ("gradients of activations", channels.input_gradients),
            ):
                if channel is not None:
                    yield name, channel

    def begin(self) -> None:
        """Begin a batch, which all stages do: what is left of a failed one is dropped."""
        for _, channel in self.named():
            channel.begin()

    def close(self) -> None:
        """Release shared memory and groups. The other ranks notice at their next message."""
        for end in self._local.values():
            end.close()
        for group in self._groups.values():
            with contextlib.suppress(ValueError):  # the job's groups are already destroyed
                dist.destroy_process_group(group)
